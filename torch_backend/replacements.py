"""What is replaced in torch while a window lasts, and restored when the last one ends.

It is state of the process, as torch's own classes and modules are: a window in another thread sees
it, too.
"""

import threading
from contextlib import AbstractContextManager


class Replacements(AbstractContextManager[None]):
    """A context in which attributes of torch are replaced. It may be entered many times, by any
    thread.

    The last exit restores them. What somebody else has replaced is left alone.
    """

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0
        # owner, name, torch's own value, ours.
        self.attributes: list[tuple[object, str, object, object]] = []

    def add(self, owner: object, name: str, value: object) -> None:
        """Replaces one attribute more."""
        self.attributes.append((owner, name, vars(owner).get(name, _ABSENT), value))

    def __enter__(self) -> None:
        with self.lock:
            self.count += 1
            for owner, name, own, value in self.attributes if self.count == 1 else ():
                if vars(owner).get(name, _ABSENT) is own:
                    setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.count -= 1
            for owner, name, own, value in () if self.count else self.attributes:
                if vars(owner).get(name) is value:
                    delattr(owner, name) if own is _ABSENT else setattr(owner, name, own)


_ABSENT = object()
# What windows on autograd replace: how functional_call runs, and that nodes of graphs note their
# creation.
replacements = Replacements()
