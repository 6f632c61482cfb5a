"""The store of winners: keyed, found again, and whole whatever happens to the process or the file."""

import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import time
import warnings

import pytest

from tests.processes import holds_in_forked_child
from tests.winners.samples import GPU, problem, winner
from warploom.core.dtypes import f16
from warploom.winners import store as store_module
from warploom.winners.classes import attention_class
from warploom.winners.store import WinnerStore, find_winner, gpu_file_name, parse_records


def config_of(found):
    assert found is not None
    return found.winner.config


def test_a_winner_is_found_again_by_another_reader(tmp_path):
    WinnerStore(tmp_path).add(winner())
    found = find_winner(GPU, attention_class(problem()), WinnerStore(tmp_path))
    assert found is not None
    assert found.winner == winner()
    assert (found.distance, found.shipped) == (0, False)
    assert "1 ms (0.9 to 1.1), 1.25× the untuned default; the winner found on this machine" in found.reason


def test_the_last_winner_of_a_class_counts_and_readers_notice_it(tmp_path):
    reader, writer = WinnerStore(tmp_path), WinnerStore(tmp_path)
    writer.add(winner(config="old"))
    assert [w.config for w in reader.winners()] == ["old"]
    writer.add(winner(config="new"))
    assert [w.config for w in reader.winners()] == ["new"]


def test_gpu_version_and_kind_of_problem_are_kept_apart(tmp_path):
    store = WinnerStore(tmp_path)
    store.add(winner(version="0.0.1"))
    store.add(winner(gpu="NVIDIA Other"))
    store.add(winner(problem(causal=True)))
    store.add(winner(problem(head_dim=64)))
    assert find_winner(GPU, attention_class(problem()), store) is None
    store.add(winner(config="right"))
    found = find_winner(GPU, attention_class(problem()), store)
    assert found is not None
    assert found.winner.config == "right"


def test_the_nearest_class_serves_within_reason(tmp_path):
    store = WinnerStore(tmp_path)
    store.add(winner(problem(1024), config="short"))
    store.add(winner(problem(4096), config="long"))

    def config_for(of):
        found = find_winner(GPU, attention_class(of), store)
        return found and (found.winner.config, found.distance > 0, "nearest class" in found.reason)

    assert config_for(problem(4096)) == ("long", False, False)
    assert config_for(problem(4000)) == ("long", False, False)
    assert config_for(problem(8192)) == ("long", True, True)
    assert config_for(problem(512)) == ("short", True, True)
    assert config_for(problem(4096, dtype=f16)) == ("long", True, True)
    assert config_for(problem(4096, head_dim=96)) == ("long", False, False)
    assert config_for(problem(64)) is None
    assert config_for(problem(1)) is None


def test_beyond_the_longest_sequences_nothing_changes():
    assert attention_class(problem(2**14, batch=1)) == attention_class(problem(2**17, batch=1))
    assert attention_class(problem(2**14)) != attention_class(problem(2**12))


def test_shipped_winners_come_after_own_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHIPPED", tmp_path)
    store_module.shipped_winners.cache_clear()
    content = {"winners": [winner(config="shipped", version="0.0.0").json()]}
    (tmp_path / gpu_file_name(GPU)).write_text(json.dumps(content))
    store = WinnerStore(tmp_path / "own")
    wanted = attention_class(problem())
    try:
        found = find_winner(GPU, wanted, store)
        assert found is not None
        assert found.shipped
        assert "comes with the package" in found.reason
        store.add(winner(problem(8192), config="own but near"))
        assert config_of(find_winner(GPU, wanted, store)) == "shipped"
        store.add(winner(config="own"))
        assert config_of(find_winner(GPU, wanted, store)) == "own"
        assert find_winner("NVIDIA Other", wanted, store) is None
    finally:
        store_module.shipped_winners.cache_clear()


def test_names_of_files():
    assert gpu_file_name("NVIDIA H200") == "nvidia-h200.json"
    assert gpu_file_name("NVIDIA GeForce RTX 4090/D") == "nvidia-geforce-rtx-4090-d.json"


def test_every_cut_of_the_file_is_read_and_continued(tmp_path):
    """A kill may leave any prefix of the file: whole records are kept, the next writer starts a line of its own."""
    store = WinnerStore(tmp_path)
    for name in ("one", "two"):
        store.append({"record": "note", "name": name})
    whole = store.path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        store.path.write_bytes(whole[:cut])
        expected = [] if cut < first else ["one"] if cut < len(whole) else ["one", "two"]
        assert [r["name"] for r in WinnerStore(tmp_path).records()] == expected
        WinnerStore(tmp_path).append({"record": "note", "name": "next"})
        assert [r["name"] for r in WinnerStore(tmp_path).records()] == [*expected, "next"]


def _write_many(folder, worker, count):
    store = WinnerStore(folder)
    for i in range(count):
        store.append({"record": "note", "worker": worker, "i": i, "text": "x" * random.randrange(3000)})


def test_many_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(tmp_path, w, 40)) for w in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
        assert process.exitcode == 0
    records, damaged = parse_records((tmp_path / "winners.jsonl").read_bytes())
    assert damaged == []
    for worker in range(4):  # nothing lost, each in its order
        assert [r["i"] for r in records if r["worker"] == worker] == list(range(40))


_ENDLESS = """
import sys, itertools
from pathlib import Path
from warploom.winners.store import WinnerStore
store = WinnerStore(Path(sys.argv[1]))
for i in itertools.count():
    store.append({"record": "note", "i": i, "text": "y" * 5000})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_killed_writer_leaves_a_whole_store(tmp_path):
    for round_ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(tmp_path)])
        path = tmp_path / "winners.jsonl"
        deadline = time.monotonic() + 20
        before = path.stat().st_size if path.exists() else 0
        while (path.stat().st_size if path.exists() else 0) <= before + 20000 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        store = WinnerStore(tmp_path)
        store.append({"record": "mark", "round": round_})  # the dead process's lock is free
        records, damaged = parse_records(path.read_bytes())
        assert damaged == []
        assert records[-1]["round"] == round_
        assert len([r for r in records if r["record"] == "mark"]) == round_ + 1


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\xff\xfe garbage\n",
        b'{"half": \n',
        b"[1, 2]\n",
        b'{"format": 99}\n',
        b'{"format":1,"record":"winner","seconds":Infinity}\n',
        b'{"format":1,"a":' + b"[" * 10**5 + b"\n",
        b"1" * 10_000 + b"\n",
    ],
    ids=lambda damage: repr(damage[:20]),
)
def test_damaged_lines_are_set_aside_with_a_warning(tmp_path, damage):
    store = WinnerStore(tmp_path)
    store.add(winner(problem(1024)))
    with open(store.path, "ab") as file:
        file.write(damage)
    WinnerStore(tmp_path).add(winner(problem(4096)))
    reader = WinnerStore(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"winners.jsonl.damaged.*warploom tune show"):
        assert len(reader.winners()) == 2
    assert (tmp_path / "winners.jsonl.damaged").read_bytes().strip() == damage.strip()
    assert len(WinnerStore(tmp_path).winners()) == 2  # and no second warning: the file is whole again


def test_a_winner_that_makes_no_sense_is_none(tmp_path):
    store = WinnerStore(tmp_path)
    sound = winner().json()
    for changes in (
        {"seconds": "fast"},
        {"seconds": -1.0},
        {"problem": 3},
        {"problem": {"sizes": {}}},
        {"rounds": None},
        {"seconds": 10**400},
        {"problem": sound["problem"] | {"sizes": dict.fromkeys(sound["problem"]["sizes"], 10**400)}},
    ):
        store.append({"record": "winner", **sound, **changes})
    line = json.dumps({"format": 1, "record": "winner", **sound, "rounds": 12345})
    with open(store.path, "a") as file:
        file.write(line.replace("12345", "1e999") + "\n")
    store.append({"record": "winner"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.winners() == []
        assert find_winner(GPU, attention_class(problem()), store) is None


def test_records_of_a_search_that_make_no_sense_are_none(tmp_path):
    store = WinnerStore(tmp_path)
    alike = winner().problem
    about = {"gpu": GPU, "version": "1"}
    for values in ({}, {"problem": 3}, {"problem": None}, {"problem": {"family": [1]}}, {"problem": alike.json()}):
        store.append({"record": "trying", **about, **values})
    store.append({"record": "trying", **about, "problem": alike.json(), "config": "hung"})
    assert "hung" in store.suspects(GPU, "1", alike)
    assert store.rounds(GPU, "1", alike, "space") == []


@pytest.mark.skipif(sys.platform == "win32", reason="pipes, links and permission bits")
@pytest.mark.parametrize("kind", ["pipe", "link", "open to others", "folder open to others", "folder", "linked folder"])
def test_a_file_that_others_can_have_written_costs_a_warning_only(tmp_path, kind):
    store = WinnerStore(tmp_path / "tuned")
    store.add(winner())
    if kind == "open to others":
        store.path.chmod(0o666)
    elif kind == "folder open to others":
        store.folder.chmod(0o777)
    elif kind == "linked folder":
        store.folder.rename(tmp_path / "aside")
        store.folder.symlink_to(tmp_path / "aside")
    else:
        store.path.rename(tmp_path / "aside")
        if kind == "pipe":
            os.mkfifo(store.path)
        elif kind == "folder":
            store.path.mkdir()
        else:
            store.path.symlink_to(tmp_path / "aside")

    def reads_nothing() -> bool:
        with pytest.warns(RuntimeWarning, match="defaults are used"):
            return find_winner(GPU, attention_class(problem()), WinnerStore(store.folder)) is None

    assert holds_in_forked_child(reads_nothing)

    def refuses_to_write() -> bool:
        with pytest.raises(OSError, match=r"winners|tuned"):
            store.add(winner())
        return True

    assert holds_in_forked_child(refuses_to_write)


@pytest.mark.skipif(sys.platform == "win32", reason="permission bits")
def test_the_folder_and_its_files_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        WinnerStore(tmp_path / "cache" / "tuned").add(winner())
    finally:
        os.umask(before)
    made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made} == {0}


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="needs a user whom permissions stop")
def test_an_unreadable_file_costs_a_warning_only(tmp_path):
    store = WinnerStore(tmp_path)
    store.add(winner())
    store.path.chmod(0)
    with pytest.warns(RuntimeWarning, match="defaults are used"):
        assert WinnerStore(tmp_path).winners() == []


def test_a_file_in_place_of_the_folder_is_an_error_when_writing(tmp_path):
    (tmp_path / "file").write_text("")
    store = WinnerStore(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="defaults are used"):
        assert store.winners() == []
    with pytest.raises(OSError, match="file"):
        store.add(winner())


def test_shipped_files_are_whole_and_quick():
    from warploom.kernels.attention.choice import parse_config

    for file in sorted(store_module.SHIPPED.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        assert gpu_file_name(content["gpu"]) == file.name
        seconds: list[float] = []
        winners = ()
        for _ in range(5):
            store_module.shipped_winners.cache_clear()
            start = time.perf_counter()
            winners = store_module.shipped_winners(content["gpu"])
            seconds.append(time.perf_counter() - start)
        assert winners
        assert min(seconds) < 5e-3, "loading should take about a millisecond"
        for one in winners:
            assert one.gpu == content["gpu"]
            if one.problem.family == "attention":
                assert parse_config(one.config).check() == []
