"""What the first steps of a job tell: equal gradients, and steps of which nobody knows how many samples they are of."""

from __future__ import annotations

from offbeat.runtime.job.first_steps import STEPS, FirstSteps, FirstStepsWatch


def test_a_worker_sends_its_first_steps_and_computes_no_checksum_later() -> None:
    asked: list[int] = []

    def digest() -> int:
        asked.append(1)
        return 7

    first = FirstSteps()
    for step in range(1, STEPS + 4):
        first.note(step, digest, known=True)
    assert first.header() == {"first": [(step, 7, True) for step in range(1, STEPS + 1)]}
    assert first.header() == {} and len(asked) == STEPS


def test_equal_gradients_are_named_once_with_all_who_have_them() -> None:
    watch = FirstStepsWatch(3)
    assert watch.note(2, [(1, 5, True)]) == [] == watch.note(0, [(1, 5, True)])
    said = watch.note(1, [(1, 5, True)])
    assert [(one.about, one.workers, one.step) for one in said] == [("equal_gradients", (0, 1, 2), 1)]
    assert all(watch.note(worker, [(2, 6, True)]) == [] for worker in range(3)), "once is enough"


def test_some_of_the_workers_are_equal_and_one_is_late() -> None:
    watch = FirstStepsWatch(4)
    for worker, digest in ((0, 5), (1, 6), (3, 5)):
        assert watch.note(worker, [(1, digest, True)]) == []
    assert watch.note(0, [(step, 10 + step, True) for step in range(2, STEPS)]) == []
    assert watch.note(0, [(STEPS, 9, True)])[0].workers == (0, 3), "the last is not waited for any longer"


def test_zeros_and_different_gradients_are_no_news() -> None:
    watch = FirstStepsWatch(2)
    for step in range(1, STEPS + 1):
        assert watch.note(0, [(step, None, True), (step + 100, 1, True)]) == [] == watch.note(1, [(step, None, True)])
    watch = FirstStepsWatch(2)
    assert all(watch.note(worker, [(step, 10 * step + worker, True)]) == [] for step in range(1, 6) for worker in range(2))


def test_equal_at_different_steps_does_not_count() -> None:
    """A script that goes through the data in order has one worker where another has been."""
    watch = FirstStepsWatch(2)
    assert watch.note(0, [(1, 5, True), (2, 6, True)]) == [] == watch.note(1, [(1, 4, True), (2, 5, True)])


def test_unknown_samples_are_said_once_a_job_and_never_of_a_single_worker() -> None:
    watch = FirstStepsWatch(2)
    assert watch.note(0, [(step, step, False) for step in range(1, STEPS)]) == []
    assert [one.about for one in watch.note(0, [(STEPS, 9, False)])] == ["samples_unknown"]
    assert watch.note(1, [(step, -step, False) for step in range(1, STEPS + 1)]) == []
    assert FirstStepsWatch(1).note(0, [(STEPS, 9, False)]) == []
