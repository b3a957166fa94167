"""What the watchdog says about processes that fail, fall silent or hang, with a key-value store in this process."""

import json
import threading
import time

import pytest

from moejax.training.watchdog import IN_STEP, Fault, PeerError, Watchdog

STALL = 0.6  # seconds; the watchdog looks 20 times in that


class FakeStore:
    """Like JAX's, but can hang."""

    def __init__(self):
        self.values, self.open = {}, threading.Event()
        self.open.set()

    def key_value_set(self, key, value, allow_overwrite=False):
        self.open.wait()
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, key):
        self.open.wait()
        return [(name, value) for name, value in self.values.items() if name.startswith(key + "/")]


class Ranks:
    """Watchdogs of several ranks on one store; `said` holds the message that ended each."""

    def __init__(self, count, stall=STALL):
        self.store, self.said, self.codes = FakeStore(), {}, {}
        self.dogs = [
            Watchdog(self.store, rank, count, stall, end=lambda fault, rank=rank: self.ended(rank, fault))
            for rank in range(count)
        ]
        for dog in self.dogs:
            dog.start()

    def ended(self, rank, fault):
        self.codes[rank] = fault.exit_code
        self.said[rank] = fault.text

    def silence(self, rank):
        """As SIGKILL and SIGSTOP do."""
        self.dogs[rank]._done.set()

    def work(self, seconds, ranks, step=0):
        """The given ranks finish a step every few milliseconds; returns the last one."""
        deadline = time.monotonic() + seconds
        while step == 0 or time.monotonic() < deadline:
            step += 1
            for rank in ranks:
                self.dogs[rank].doing(IN_STEP)
                self.dogs[rank].step(step)
            time.sleep(0.02)
        return step

    def settle(self, step):
        """Until all have published this step."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            reports = [json.loads(value) for value in list(self.store.values.values())]
            if len(reports) == len(self.dogs) and all(report["step"] == step for report in reports):
                time.sleep(0.1)  # and read it
                return
            for dog in self.dogs:
                dog.step(step)
            time.sleep(0.01)

    def wait(self, ranks, seconds=5 * STALL):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(rank in self.said for rank in ranks):
            time.sleep(0.01)
        return [self.said.get(rank) for rank in ranks]


@pytest.fixture
def ranks():
    made = []

    def make(count, **options):
        made.append(Ranks(count, **options))
        return made[-1]

    yield make
    for each in made:
        each.store.open.set()
        for dog in each.dogs:
            dog._done.set()


def test_ranks_that_work_are_left_alone_and_may_leave_one_after_the_other(ranks):
    job = ranks(3)
    job.work(2 * STALL, (0, 1, 2))
    job.dogs[1].leave()
    job.work(2 * STALL, (0, 2))
    assert not job.said


def test_before_training_a_slow_rank_may_take_its_time(ranks):
    job = ranks(2)
    time.sleep(2 * STALL)
    assert not job.said


def test_a_rank_that_compiles_after_training_may_take_its_time_too(ranks):
    job = ranks(2)
    job.settle(job.work(0.2, (0, 1)))
    for dog in job.dogs:
        dog.doing("generating a sample", compiles=True)
    time.sleep(2 * STALL)
    assert not job.said
    for dog in job.dogs:
        dog.doing("writing the report")
    assert job.wait((0,))[0].startswith("no progress for")


def test_a_silent_rank_is_named_with_its_last_step(ranks):
    job = ranks(3)
    step = job.work(0.3, (0, 1, 2))
    job.settle(step)
    job.silence(2)
    started = time.monotonic()
    said = job.wait((0, 1))
    assert time.monotonic() - started < 4 * STALL
    for text in said:
        assert text.startswith("rank 2 has been silent for") and f"at step {step} ({IN_STEP})" in text, text


def test_a_rank_that_never_came_is_named(ranks):
    store, said = FakeStore(), []
    dog = Watchdog(store, 0, 2, STALL, end=said.append)
    dog.start()
    time.sleep(2 * STALL)
    dog._done.set()
    assert said and said[0].text.startswith("rank 1 has been silent") and "before it began" in said[0].text


def test_a_store_that_does_not_answer_means_rank_0_is_lost(ranks):
    job = ranks(2)
    step = job.work(0.3, (0, 1))
    job.settle(step)
    job.store.open.clear()
    (said,) = job.wait((1,))
    assert said.startswith("rank 0, which keeps the job together, has not answered") and f"at step {step}" in said


def test_a_hang_names_the_rank_that_is_not_in_the_step(ranks):
    job = ranks(3)
    step = job.work(0.2, (0, 1, 2))
    job.settle(step)
    for rank, doing in enumerate((IN_STEP, "loading data", IN_STEP)):
        job.dogs[rank].doing(doing)
    for text in job.wait((0, 1, 2)):
        assert text.startswith("no progress for") and f"rank 1 is at step {step} (loading data)" in text, text
        assert "rank 0" not in text and "rank 2" not in text


def test_a_failure_is_told_to_the_others_with_its_reason(ranks):
    job = ranks(2)
    step = job.work(0.2, (0, 1))
    job.settle(step)
    job.dogs[1].leave(Fault("corpus.txt: No space left on device", 1))
    (said,) = job.wait((0,))
    assert said == f"rank 1 failed at step {step} ({IN_STEP}): corpus.txt: No space left on device"
    assert job.codes == {0: 1}  # as rank 1: whoever starts the job again meets the same error


def test_rank_0_keeps_the_store_until_the_others_have_ended(ranks):
    job = ranks(3, stall=4.0)
    step = job.work(0.5, (0, 1, 2))
    job.settle(step)
    job.silence(2)
    leaving = threading.Thread(target=job.dogs[0].leave, args=(Fault("rank 2 has been silent"),))
    leaving.start()
    assert job.wait((1,)) == ["rank 2 has been silent"] and job.codes == {1: 75} and leaving.is_alive()
    job.silence(1)  # its process is gone
    leaving.join(5 * STALL)
    assert not leaving.is_alive() and 0 not in job.said


def test_an_error_in_the_step_is_blamed_on_the_rank_that_fell_silent(ranks):
    job = ranks(3, stall=4.0)
    step = job.work(0.5, (0, 1, 2))
    job.settle(step)
    job.silence(1)
    started = time.monotonic()
    said = job.dogs[0].blame().text
    assert said.startswith("rank 1 has been silent") and f"at step {step}" in said
    assert time.monotonic() - started < 8
    alone = ranks(2, stall=1.0)
    alone.work(0.2, (0, 1))
    assert alone.dogs[0].blame() is None, "nobody else is at fault"


def test_a_machine_that_was_suspended_as_a_whole_goes_on(ranks, monkeypatch):
    """All clocks jump by an hour at once, as after the suspension of a job by its scheduler."""
    job = ranks(2)
    job.work(0.3, (0, 1))
    real, jump = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + jump[0])
    jump[0] = 3600.0
    job.work(2 * STALL, (0, 1))
    assert not job.said


def test_one_process_has_nothing_to_watch():
    dog = Watchdog(None, 0, 1, 0)
    dog.step(3)
    dog.doing(IN_STEP)
    assert dog.blame() is None
    dog.leave(Fault("anything"))
    assert issubclass(PeerError, RuntimeError)
