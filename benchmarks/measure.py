"""How figures are measured: ratios of paired runs, and bytes of live storages.

Time: contender and rival in turn, in one process; the median of the pairwise ratios, and their quartiles. Which of the
two goes first alternates. Memory: the peak of the torch storages created while the code runs, counted, not sampled.
"""

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any


def ratio(contender: Callable[[], Any], rival: Callable[[], Any], runs: int = 41, warm: int = 3) -> tuple[float, ...]:
    """Quartiles of time(contender) / time(rival) over interleaved pairs: (lower, median, upper)."""
    for _ in range(warm):
        contender(), rival()
    gc.collect()
    ratios = []
    for k in range(runs):
        pair = (contender, rival) if k % 2 else (rival, contender)
        times = {f: _seconds(f) for f in pair}
        ratios.append(times[contender] / times[rival])
    return tuple(statistics.quantiles(ratios, n=4))


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class PeakBytes:
    """`with PeakBytes() as peak: f()`; then `peak.bytes`: the peak of the torch storages created inside."""

    def __enter__(self) -> "PeakBytes":
        from torch.utils import _pytree
        from torch.utils._python_dispatch import TorchDispatchMode

        self.bytes, self._live = 0, 0
        seen: set[int] = set()
        peak = self

        def created(tensor: Any, before: set[int]) -> None:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in seen or key in before:
                return
            seen.add(key)
            peak._live += size
            peak.bytes = max(peak.bytes, peak._live)

            def freed() -> None:
                seen.discard(key)
                peak._live -= size

            weakref.finalize(storage, freed)

        def tensors(tree: Any) -> list[Any]:
            return [leaf for leaf in _pytree.tree_leaves(tree) if hasattr(leaf, "untyped_storage")]

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                before = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
                out = op(*args, **(kwargs or {}))
                for tensor in tensors(out):
                    created(tensor, before)
                return out

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
