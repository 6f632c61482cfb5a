"""What docs/evidence/ladder-gemm.md has of power, waves and counters says what the figures say, right or not."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from tests.project import ROOT, load

RUNGS = ("01a", "02", "best32")


def power(tflops: float, watts: float, mhz: float, cycles: float) -> dict[str, Any]:
    return {
        "tflops": tflops,
        "watts": watts,
        "sm_mhz": mhz,
        "tflop_per_joule": tflops / watts,
        "cycles_per_mma": cycles,
    }


def powers() -> dict[str, Any]:
    products = {"cublas": power(700, 700, 1400, 4.5), "refused": {"refused": "wrong"}}
    return {
        "environment": {"gpu": {"name": "NVIDIA X"}, "date": "2031-05-06"},
        "rate": {
            "f32 64x64 mma alone": power(630, 630, 1900, 6.6),
            "f32 64x64 mma and ldmatrix": power(567, 700, 1800, 6.9),
            "f32 64x64 mma, ldmatrix and barriers": power(545, 700, 1800, 7.4),
            "f32 64x64 mma, ldmatrix and copies": power(480, 700, 1700, 7.7),
            "f32 64x64 mma, ldmatrix, copies and barriers": power(460, 700, 1700, 8.5),
        },
        "f16": products | {"best": power(525, 700, 1700, 7.1), "other": power(420, 700, 1700, 7.5)},
        "f32": products | {"best": power(490, 700, 1500, 8.0), "other": power(350, 700, 1700, 9.5)},
    }


def waves() -> dict[str, Any]:
    """132 and 143 tiles of 128×256, and a layer's product of fewer."""

    def row(m: int, n: int, **rates: float) -> dict[str, Any]:
        return {"m": m, "n": n, "k": 4096, **{name: {"tflops": rate, "config": ""} for name, rate in rates.items()}}

    summary = {"geomean": 0.6, "least": 0.5, "products": 1}
    return {
        "environment": {"gpu": {"name": "NVIDIA X"}, "date": "2031-05-06"},
        "multiprocessors": 132,
        "waves": {
            "products": {
                "even k×n": row(1536, 2816, whole=500.0, stream_k=490.0, cublas=700.0),
                "uneven k×n": row(1664, 2816, whole=300.0, split_k=310.0, stream_k=450.0, cublas=700.0),
            }
        },
        "layers": {
            "products": {"layer n×k": row(256, 10240, whole=300.0, split_k=320.0, stream_k=400.0, cublas=640.0)},
            "summary": {"best": summary | {"geomean": 0.62}, "whole": summary, "split_k": summary, "stream_k": summary},
        },
    }  # fmt: skip


def counted(emulator: int, ncu: float) -> dict[str, float]:
    return {"emulator": emulator, "ncu": ncu}


def profile() -> dict[str, Any]:
    """01a is merged; cp.async differs where lines are not aligned."""

    def rows(key: str) -> dict[str, Any]:
        loads = counted(100, 60.0 if key == "01a" else 100.0)
        whole = {"ldmatrix": counted(8, 8.0), "ld.shared": loads, "cp.async": counted(40, 40.0)}
        stalls = {"wait": 30.0, "selected": 50.0, "barrier": 5.0, "math_pipe_throttle": 15.0}
        counters = {"pipes, %": {"tensor": 88.4}, "memory, %": {"shared loads": 57.0}, "stall shares, %": stalls}
        found = {"whole tiles": whole, "unaligned": whole | {"cp.async": counted(40, 60.0 if key == "02" else 160.0)}}
        return {"wavefronts": found, "counters": counters}

    return {
        "environment": {"gpu": {"name": "NVIDIA X"}, "date": "2031-05-06", "ncu": "2025.3"},
        "size": 4096, "small": {"whole tiles": [256, 256, 256], "unaligned": [328, 264, 200]},
        "rungs": {key: rows(key) for key in RUNGS},
    }  # fmt: skip


@pytest.fixture
def evidence() -> Any:
    """What the parts read: the power and the counters above beside the ladder's committed cells."""
    found = load("gemm_page").Evidence()
    found.power, found.profile = powers(), profile()
    return found


def test_a_difference_that_nothing_explains_is_no_page(evidence: Any) -> None:
    module = load("gemm_page_counters")
    evidence.profile["without the hint"] = {"04": {"whole tiles": {"cp.async": counted(40, 41.0)}}}
    with pytest.raises(ValueError, match="at -O1 both sides differ"):
        module.both_sides(evidence)
    rows = [row["wavefronts"] for row in evidence.profile["rungs"].values()]
    rows[1]["whole tiles"]["ldmatrix"] = counted(8, 9.0)
    with pytest.raises(ValueError, match="rung 02, whole tiles: nothing explains ldmatrix"):
        module.both_sides(evidence)
    for row in rows:
        for product in row.values():
            product |= {kind: counted(pair["emulator"], pair["emulator"]) for kind, pair in product.items()}
    assert module.both_sides(evidence).endswith("(unaligned), for every rung.")


@pytest.mark.parametrize(
    ("rung", "product", "kind", "explained"),
    [("01a", "whole tiles", "ld.shared", True), ("01b", "whole tiles", "ld.shared", False),
     ("01b", "ragged", "ld.shared", True), ("03", "ragged", "cp.async", False), ("03", "unaligned", "cp.async", True),
     ("04", "whole tiles", "cp.async", True), ("04", "ragged", "ldmatrix", False),
     ("02", "ragged", "st.shared", False)],
)  # fmt: skip
def test_what_may_differ_and_what_not(rung: str, product: str, kind: str, explained: bool) -> None:
    assert (load("gemm_page_counters").reason(rung, product, kind) is not None) is explained


def test_counters_name_the_two_largest_stalls(evidence: Any) -> None:
    del evidence.profile["rungs"]["01a"]["counters"]
    table = load("gemm_page_counters").counters(evidence)
    assert "| 02 | 88 % | 57 % | – | wait 30 %, math_pipe_throttle 15 % |" in table
    assert "| 01a |" not in table


def test_what_mma_sync_can_reach_is_computed(evidence: Any) -> None:
    alone, rested, limit = load("gemm_page_power").reading(evidence).split("\n\n")
    at_full_clock = 132 * 4 * 4096 / 6.9 * 1980e6 / 1e12  # 621
    assert (
        f"6.60 cycles, and with the `ldmatrix` of 64×64 warp tiles for 6.90: 649 and {at_full_clock:.0f} TFLOP/s"
        in (alone)
    )
    assert "make it 7.40, as many copies 7.70, both 8.50; that product itself takes 8.00" in alone
    assert "cuBLAS's take 4.50" in alone
    cell = evidence.cells("f32", "best32")[8192]
    cublas = cell["peers"]["cublas"]["tflops"]["median"]
    assert f"three quarters of cuBLAS are {0.75 * cublas:.0f} TFLOP/s" in rested
    assert f"{0.75 * cublas / at_full_clock:.0%} of what `mma.sync` and `ldmatrix` alone reach" in rested
    keys = [key for key, row in evidence.rows("f32").items() if key[0] != "h"]
    best = max(evidence.cells("f32", key)[8192]["tflops"]["median"] for key in keys)
    assert (
        f"accumulators reaches {best:.0f}, {best / at_full_clock:.0%} of it and {best / cublas:.2f}× cuBLAS" in rested
    )
    assert "700 to 700 W, at 1400 to 1700 MHz" in limit
    assert "0.75 TFLOP/J" in limit
    assert "0.70 with f32 accumulators and 0.75 with f16: 0.70× and 0.75× cuBLAS" in limit
    assert "70% is what `mma.sync` alone takes, 16% its fragments, and 14% the rest" in limit


def test_the_kernels_that_are_read_are_those_that_are_measured() -> None:
    pytest.importorskip("torch")
    power, page = load("gemm_power_h200"), load("gemm_page_power")
    assert tuple(power.FEEDS) == tuple(f"mma{name}" for name in page._FEEDS)
    assert {(a.name, m, n) for a, m, n, feeds in power.RATES if feeds == tuple(power.FEEDS)} >= {("f32", 64, 64)}


def test_the_table_of_power() -> None:
    module, found = load("gemm_page_power"), SimpleNamespace(power=powers())
    table = module.power_table(found.power["f32"])
    assert "| best | 490 | 700 | 1500 | 0.7 | 8 |" in table
    assert "refused" not in table


def test_the_tables_of_schedules() -> None:
    module, found = load("gemm_page_waves"), SimpleNamespace(waves=waves())
    table = module.wave_table(found)
    assert "| even | 1.00 | 500 (0.71) | – | 490 (0.70) | 700 |" in table
    assert "| uneven | 1.08 | 300 (0.43) | 310 (0.44) | 450 (0.64) | 700 |" in table
    assert "from 1 to 1.08 waves 40% and 10%" in module.uneven(found)
    assert "| layer n×k | 256×10240×4096 | 300 (0.47) | 320 (0.50) | 400 (0.62) | 640 |" in module.layer_table(found)
    text = module.layer_summary(found)
    assert "Of these 1 the fastest is whole tiles 0 times, split K 0 times, stream-K 1 times" in text
    assert "stream-K 0.60, the best of each 0.62 and never below 0.50" in text


def test_products_of_layers_are_told_by_rows() -> None:
    rows = [
        {"name": f"{name}.m{m}", "weights": layout, "cublas": 100.0, "best mma.sync": rate}
        for m, rates in ((16, (100.0, 121.0)), (256, (49.0, 64.0)), (8192, (81.0, 49.0)))
        for name, rate in zip("ab", rates, strict=True)
        for layout in ("n×k", "k×n")
    ]
    text = load("gemm_page_power").layers(SimpleNamespace(products={"shapes": rows}))
    assert "1.10× of cuBLAS at 16 rows, 0.56× at 256 and 0.63× at 8192" in text
    mean = (1.0 * 1.21 * 0.49 * 0.64 * 0.81 * 0.49) ** (1 / 6)
    assert f"over all {mean:.2f}× with weights stored n×k and {mean:.2f}× with k×n; the least is 0.49×" in text


def test_the_whole_page_takes_power_and_counters_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("gemm_page")
    for kind in ("f16", "f32"):
        shutil.copy(ROOT / f"benchmarks/results/h200/gemm-{kind}.json", tmp_path)
    shutil.copy(ROOT / "benchmarks/results/h200/gemm.json", tmp_path)
    (tmp_path / "gemm-power.json").write_text(json.dumps(powers()), encoding="utf-8")
    (tmp_path / "gemm-waves.json").write_text(json.dumps(waves()), encoding="utf-8")
    (tmp_path / "profile-gemm.json").write_text(json.dumps(profile()), encoding="utf-8")
    monkeypatch.setattr(module, "TIMED", tmp_path)
    monkeypatch.setattr(module, "outdated", lambda *_: "")
    text = module.page()
    assert "*NVIDIA X, 2031-05-06, ncu 2025.3*" in text
    for part in ("Other counters of the hardware, N = 4096", "**Alone**", "## Uneven counts of tiles"):
        assert text.count(part) == 1
    assert "@" not in text.replace("@!PT", "")
    assert "<!-- if" not in text
