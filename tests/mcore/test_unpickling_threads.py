"""Who else unpickles while a checkpoint is read."""

import pickle
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("megatron")


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_two_threads_read_one_after_the_other_and_leave_pickle_as_it_was(tmp_path):
    from bundle.mcore import unpickling

    hostile, before = pickle.dumps(Payload(tmp_path / "ran")), (pickle.load, pickle.loads)
    inside, both = threading.Event(), threading.Event()
    seen: list[str] = []

    def one() -> None:
        with unpickling.restrict_to_data():
            inside.set()
            both.wait(0.3)  # for ever, if only one may be in there

    def other() -> None:
        inside.wait()
        with unpickling.restrict_to_data():
            both.set()
            threads[0].join()
            try:
                pickle.loads(hostile)
            except pickle.UnpicklingError as error:
                seen.append(str(error))

    threads = [threading.Thread(target=each) for each in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (refusal,) = seen
    assert "Path.touch" in refusal
    assert (pickle.load, pickle.loads) == before
    assert not (tmp_path / "ran").exists()


def test_whoever_else_unpickles_meanwhile_gets_data_or_an_error(tmp_path):
    """A thread that knows nothing of checkpoints: it fails closed, and freely goes on afterwards."""
    from bundle.mcore import unpickling

    hostile, outcomes = pickle.dumps(Payload(tmp_path / "ran")), []

    def stranger() -> None:
        assert pickle.loads(pickle.dumps({"step": 3})) == {"step": 3}
        try:
            pickle.loads(hostile)
        except pickle.UnpicklingError:
            outcomes.append("refused")

    for context in (unpickling.restrict_to_data(), nullcontext()):
        with context:
            thread = threading.Thread(target=stranger)
            thread.start()
            thread.join()
    assert outcomes == ["refused"]
    assert (tmp_path / "ran").exists()
