"""The consumers of the ladder's ``wgmma`` matmul kernels, which wait for each k-tile's products."""

from __future__ import annotations

from warploom.kernels.matmul.sm90_kernel import Sm90Product
from warploom.kernels.matmul.values import ResultTile
from warploom_lab.kernels.matmul.ladder_sm90 import RungWgmma


class StepwiseProduct(Sm90Product):
    """A product whose consumers may wait for each k-tile before they start the next."""

    config: RungWgmma

    def _multiply(self, tile: ResultTile) -> None:
        if self.config.in_flight:
            super()._multiply(tile)
            return
        with self._turns:
            self._start(zero=True)
            self._cores.wait(0)
            self._stages.release()
            with self._k.loop(tile.count, start=1):
                self._start(zero=False)
                self._cores.wait(0)
                self._stages.release()
        self._cores.wait(0, *self._blocks)
