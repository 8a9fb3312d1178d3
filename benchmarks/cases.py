"""What is measured: the cases, each of which runs in a process of its own."""

from typing import Any, NamedTuple

MODES = ("quick", "default", "full", "coupled", "large")


class Case(NamedTuple):
    """One case: a group of contenders on one workload."""

    name: str
    kind: str  # update, growth, exactness or imports
    setting: str  # the folder of its contenders
    workload: str = ""
    n: int = 8  # micro-batches
    value: int = 0  # along the axis, if it is growth
    ranks: int = 1  # processes, or devices of one process in JAX
    device: str = "cpu"
    seconds: float = 20.0  # that the rounds take, about
    only: tuple[str, ...] = ()  # files of contenders; empty means all
    threads: int = 0  # of each process in torch; 0 means as many as there are cores for it

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Case":
        """The case that `_asdict` and JSON have made lists of."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def cases(mode: str, device: str = "cpu") -> list[Case]:
    """The cases of a mode, on one device."""
    made = {"quick": _quick, "default": _default, "full": _full, "coupled": _coupled, "large": _large}[mode]()
    if device != "cpu":
        made = [case for case in made if case.setting in _ONE_DEVICE]
    seconds = {"quick": 0.3, "default": 8.0, "full": 45.0, "coupled": 100.0, "large": 60.0}[mode]
    share = lambda case: 0.15 if case.kind == "growth" else 1.0
    threads = 1 if mode == "quick" else 0  # on small tensors, and beside other programs, more only wait for each other
    return [
        case._replace(device=device, seconds=seconds * share(case), threads=threads or case.threads) for case in made
    ]


_ONE_DEVICE = ("torch", "torch_compiled", "torch_optimizer", "torch_coupled", "jax", "jax_optimizer", "imports")


def _quick() -> list[Case]:
    return [
        _update("torch", "tiny", n=4),
        _update("torch_compiled", "leaves", n=2, value=2)._replace(only=("funcga_loss",)),
        _update("torch_ranks", "tiny", n=2, ranks=2),
        _update("torch_optimizer", "tiny", n=2),
        _update("torch_coupled", "tiny_pairs", n=3),
        _update("jax", "tiny", n=4),
        _update("jax_devices", "tiny", n=2, ranks=2),
        _update("jax_optimizer", "small", n=2),
        # XLA compiles each question for each contender, and the tests ask all of those of torch over ranks
        *(case for case in _exactness(jax=("optax_multi_steps",)) if case.ranks == 1),
        *_growing("micro-batches", "torch", "rows", (4,)),
        Case("imports", "imports", "imports", only=("funcga",)),
    ]


def _default() -> list[Case]:
    return [
        *(_update("torch", workload) for workload in ("tiny", "transformer", "wide", "gpt2")),
        _update("torch", "wide_bfloat16"),
        *(_update("torch_compiled", workload) for workload in ("tiny", "transformer")),
        *(_update("torch_ranks", workload, ranks=2) for workload in ("tiny", "transformer", "wide")),
        *(_update("torch_optimizer", workload) for workload in ("tiny", "transformer", "wide")),
        *(_update("jax", workload) for workload in ("tiny", "transformer", "wide", "scanned")),
        *(_update("jax_devices", workload, ranks=4) for workload in ("transformer", "scanned")),
        _update("jax_optimizer", "matrices"),
        *_exactness(),
        Case("imports", "imports", "imports"),
    ]


def _full() -> list[Case]:
    return _default() + _growth()


def _coupled() -> list[Case]:
    """Apart from the others, as the rivals' packages are large; of one thread, so that ratios are those of the work."""
    made = [
        _update("torch_coupled", "pairs"),
        _update("torch_coupled", "many_pairs", n=16),
        Case("exactness/torch_coupled", "exactness", "torch_coupled"),
    ]
    return [case._replace(threads=1) for case in made]


def _large() -> list[Case]:
    """Apart from the others, as large weights take long; of one thread, so that ratios are those of the work."""
    workloads = ("vocabulary", "untied", "large_transformer", "wide")
    return [_update("torch", workload, threads=1) for workload in workloads]


def _update(setting: str, workload: str, **fields: Any) -> Case:
    return Case(f"{setting}/{workload}", "update", setting, workload, **fields)


def _exactness(**only: tuple[str, ...]) -> list[Case]:
    """One case a setting; `only` has the contenders of a setting."""
    settings = {"torch": 1, "torch_ranks": 2, "jax": 1, "jax_devices": 2}
    make = lambda name, ranks: Case(f"exactness/{name}", "exactness", name, ranks=ranks, only=only.get(name, ()))
    return [make(name, ranks) for name, ranks in settings.items()]


def _growth() -> list[Case]:
    counts, leaves = (1, 4, 16, 64, 256, 1024), (10, 100, 1000, 10_000)
    parameters = tuple(10**6 * k for k in (1, 3, 10, 30, 100, 300))
    return [
        *_growing("micro-batches", "torch", "rows", counts),
        *_growing("micro-batches", "jax", "rows", counts),
        *_growing("leaves", "torch", "leaves", leaves, n=4),
        # XLA compiles 1,000 leaves in 13 seconds of a core, twice, and 10,000 would take it more than ten times as long
        *_growing("leaves", "jax", "leaves", (10, 30, 100, 300, 1000), n=4),
        *_growing("parameters", "torch", "parameters", parameters, n=4),
        *_growing("parameters", "jax", "parameters", parameters, n=4),
        *_growing("ranks", "torch_ranks", "transformer", (1, 2, 4)),
        *_growing("ranks", "jax_devices", "transformer", (1, 2, 4)),
    ]


def _growing(axis: str, setting: str, workload: str, values: tuple[int, ...], n: int = 8) -> list[Case]:
    """One case a point: ours and the loop by hand."""
    case = Case(f"growth/{axis}/{setting}", "growth", setting, workload, n, only=("funcga",))
    ranks = lambda value: value if axis == "ranks" else 1
    return [case._replace(name=f"{case.name}/{value}", value=value, ranks=ranks(value)) for value in values]
