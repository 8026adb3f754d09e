"""The loader and the evaluation batches: order, division between workers, resume, bad settings."""

import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import eval_batches, make_loader
from training.token_file import TokenFile, open_tokens, write_tokens

LENGTH = 4


def numbered(folder, sequences: int, extra: int = 0) -> TokenFile:
    """A file whose token at position p is p: the first token of a window tells its number."""
    count = sequences * LENGTH + 1 + extra
    write_tokens(folder / f"{count}.tokens", [np.arange(count)], count, "position")
    return open_tokens(folder / f"{count}.tokens")


@pytest.fixture
def tokens_24(tmp_path):
    return numbered(tmp_path, 24)


def numbers(batch) -> list[int]:
    """Returns the window numbers of a batch, and checks that the rows are those windows."""
    tokens = batch["tokens"]
    assert tokens.dtype == np.int32
    first = tokens[:, :1]
    assert (tokens == first + np.arange(LENGTH + 1)).all()
    assert (first % LENGTH == 0).all()
    return (first[:, 0] // LENGTH).tolist()


def take(loader, n) -> list[list[int]]:
    return [numbers(batch) for batch in itertools.islice(loader, n)]


def order(loader, batches) -> list[int]:
    return list(itertools.chain.from_iterable(take(loader, batches)))


def loader_of(file, **changes):
    return make_loader(file, **({"global_batch": 4, "length": LENGTH, "seed": 0} | changes))


@settings(max_examples=30)
@given(
    sequences=st.integers(1, 40),
    extra=st.integers(0, LENGTH - 1),
    global_batch=st.integers(1, 8),
    seed=st.integers(0, 2**70),
)
def test_an_epoch_visits_every_window_at_most_once(tmp_path_factory, sequences, extra, global_batch, seed):
    file = numbered(tmp_path_factory.mktemp("t"), sequences, extra)
    if sequences < global_batch:
        with pytest.raises(ValueError, match=f"got {sequences} sequences"):
            loader_of(file, global_batch=global_batch, seed=seed)
        return
    with loader_of(file, global_batch=global_batch, seed=seed, num_threads=0) as loader:
        assert (loader.sequences, loader.batches_per_epoch) == (sequences, sequences // global_batch)
        assert loader.unused_per_epoch == sequences % global_batch
        for epoch in range(3):
            assert loader.epoch == epoch
            batches = take(loader, loader.batches_per_epoch)
            assert {len(batch) for batch in batches} == {global_batch}
            seen = list(itertools.chain.from_iterable(batches))
            assert len(seen) == len(set(seen)) == sequences - loader.unused_per_epoch
            assert set(seen) <= set(range(sequences))


def test_each_epoch_has_an_order_of_its_own(tokens_24):
    with loader_of(tokens_24) as loader:
        epochs = [tuple(order(loader, 6)) for _ in range(4)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert list(range(24)) not in [list(epoch) for epoch in epochs]


def test_the_order_is_the_same_in_every_version(tokens_24):
    """A known answer: a run resumed after an upgrade must not silently continue in another order."""
    with loader_of(tokens_24, global_batch=8) as loader:
        assert take(loader, 4) == [
            [18, 8, 16, 7, 20, 13, 1, 0],
            [19, 17, 10, 9, 21, 15, 3, 2],
            [11, 6, 12, 14, 4, 23, 22, 5],
            [6, 20, 4, 13, 0, 7, 10, 16],
        ]


def test_seeds_share_no_orders(tokens_24):
    """grain adds the epoch to the seed: epoch 1 of seed 0 must not be epoch 0 of seed 1."""
    orders = []
    for seed in range(4):
        with loader_of(tokens_24, seed=seed) as loader:
            orders += [tuple(order(loader, 6)) for _ in range(4)]
    assert len(set(orders)) == 16


def test_the_shuffle_is_global(tmp_path):
    """Windows move far from their place, so that one worker does not read one document."""
    file = numbered(tmp_path, 1000)
    with loader_of(file, global_batch=1000) as loader:
        (moved,) = take(loader, 1)
    distance = np.abs(np.array(moved) - np.arange(1000)).mean()
    assert 280 < distance < 390  # a uniform permutation: 333 +- 8


def test_windows_of_a_remainder_are_used_in_other_epochs(tmp_path):
    file = numbered(tmp_path, 10)
    with loader_of(file) as loader:
        epochs = [set(order(loader, 2)) for _ in range(10)]
    assert all(len(epoch) == 8 for epoch in epochs)
    assert set.union(*epochs) == set(range(10))


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_global_batches_do_not_depend_on_the_number_of_workers(tokens_24, num_workers):
    with loader_of(tokens_24, global_batch=8) as one:
        expected = take(one, 9)
    with loader_of(tokens_24, global_batch=8, num_workers=num_workers) as loader:
        assert take(loader, 9) == expected


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_read_disjoint_blocks_of_the_same_batch(tokens_24, process_count):
    with loader_of(tokens_24, global_batch=8) as one:
        expected = take(one, 9)
    parts = []
    for index in range(process_count):
        changes = {"num_workers": 4, "process_index": index, "process_count": process_count}
        with loader_of(tokens_24, global_batch=8, **changes) as loader:
            parts.append(take(loader, 9))
    joined = [list(itertools.chain(*blocks)) for blocks in zip(*parts, strict=True)]
    assert joined == expected
    assert {len(block) for part in parts for block in part} == {8 // process_count}


def test_64_sequences_on_4_workers_are_all_used_once(tmp_path):
    file = numbered(tmp_path, 64)
    workers = [set() for _ in range(4)]
    with loader_of(file, global_batch=16, num_workers=4) as loader:
        for batch in take(loader, loader.batches_per_epoch):
            for worker, rows in enumerate(np.split(np.array(batch), 4)):
                workers[worker] |= set(rows.tolist())
    assert [len(worker) for worker in workers] == [16] * 4
    assert set.union(*workers) == set(range(64))


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3])
@pytest.mark.parametrize("prefetch_batches", [0, 1, 8])
def test_reading_ahead_changes_nothing(tmp_path, num_threads, prefetch_batches):
    """34 sequences in batches of 16: two full batches an epoch, whoever reads them."""
    file = numbered(tmp_path, 34)
    with loader_of(file, global_batch=16, num_threads=0) as loader:
        expected = take(loader, 7)
    changes = {"num_threads": num_threads, "prefetch_batches": prefetch_batches, "global_batch": 16}
    with loader_of(file, **changes) as loader:
        assert loader.batches_per_epoch == 2
        assert take(loader, 7) == expected


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 11, 12, 13])
@pytest.mark.parametrize("ahead", [0, 8])
def test_resume_continues_with_the_next_batch(tokens_24, stop, ahead):
    """24 sequences, 6 batches an epoch; stops before, at and after the ends of epochs; prefetch 8 <-> 0."""
    with loader_of(tokens_24) as loader:
        expected = take(loader, 18)
    with loader_of(tokens_24, prefetch_batches=ahead, num_threads=2) as loader:
        before = take(loader, stop)
        time.sleep(0.01)  # let the threads run ahead of what was handed out
        state = json.loads(json.dumps(loader.get_state()))
    assert state["step"] == stop
    with loader_of(tokens_24, prefetch_batches=8 - ahead, num_workers=2) as loader:
        loader.set_state(state)
        assert (loader.step, loader.epoch) == (stop, stop // 6)
        assert before + take(loader, 18 - stop) == expected
        assert loader.get_state()["step"] == 18


@pytest.mark.parametrize("start_step", [0, 5, 6, 1000])
def test_start_step_is_the_same_as_set_state(tokens_24, start_step):
    with loader_of(tokens_24, start_step=start_step) as direct, loader_of(tokens_24) as restored:
        restored.set_state(direct.get_state())
        assert take(restored, 3) == take(direct, 3)
        assert direct.step == start_step + 3


def test_set_state_goes_back_too(tokens_24):
    with loader_of(tokens_24) as loader:
        start, first = loader.get_state(), take(loader, 8)
        loader.set_state(start)
        assert take(loader, 8) == first


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_read_loses_no_batch(tokens_24, monkeypatch, num_threads, error):
    """The position stays that of the last batch handed out, also when Ctrl-C strikes inside of next()."""
    with loader_of(tokens_24) as loader:
        expected = take(loader, 6)
    read, failed = TokenFile.read_windows, []

    def fail_once(self, starts, length):
        if not failed and starts[0] // LENGTH == expected[2][0]:
            failed.append(True)
            raise error("once")
        return read(self, starts, length)

    monkeypatch.setattr(TokenFile, "read_windows", fail_once)
    with loader_of(tokens_24, num_threads=num_threads) as loader:
        got = take(loader, 2)
        with pytest.raises(error, match="once"):
            next(loader)
        assert loader.get_state()["step"] == 2
        assert got + take(loader, 4) == expected


def test_a_position_of_other_data_or_settings_is_refused(tokens_24, tmp_path):
    with loader_of(tokens_24) as loader:
        take(loader, 3)
        state = loader.get_state()
    for changes, message in [
        ({"global_batch": 8}, "global_batch was 4, is 8"),
        ({"length": 2}, "length was 4, is 2"),
        ({"seed": 1}, "seed was 0, is 1"),
    ]:
        with loader_of(tokens_24, **changes) as loader, pytest.raises(ValueError, match=message):
            loader.set_state(state)
    with loader_of(numbered(tmp_path, 24, extra=1)) as other:
        with pytest.raises(ValueError, match=r"checksum was .*count was 97, is 98"):
            other.set_state(state)
        assert other.step == 0
        with pytest.raises(ValueError, match="step >= 0, got -1"):
            other.set_state(other.get_state() | {"step": -1})


def test_a_wrong_id_stops_the_loader(tmp_path):
    file = numbered(tmp_path, 24)
    data = bytearray(file.path.read_bytes())
    data[128 + 2 * 50 + 1] = 1  # token 50 becomes 306
    file.path.write_bytes(data)
    with loader_of(open_tokens(file.path, verify=False)) as loader:
        with pytest.raises(ValueError, match=r"\[0, 97\).*id 306 at position 50"):
            take(loader, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 6, "num_workers": 4}, "6 sequences for 4 workers"),
        ({"global_batch": 3, "num_workers": 4}, "3 sequences for 4 workers.*Use 4"),
        ({"global_batch": 0}, "got 0, 4, 1 and 1"),
        ({"length": 0}, "got 4, 0, 1 and 1"),
        ({"num_workers": 0}, "got 4, 4, 0 and 1"),
        ({"num_workers": 2, "process_count": 4}, "2 workers in 4 processes"),
        ({"num_workers": 2, "process_count": 2, "process_index": 2}, r"\[0, 2\), got 2"),
        ({"global_batch": 25}, "global batch of 25 sequences.*got 24 sequences of 4 .*97 tokens of"),
        ({"length": 97}, "got 0 sequences"),
        ({"seed": -1}, "seed=-1"),
        ({"start_step": -1}, "start_step=-1"),
        ({"prefetch_batches": -1}, "got -1 and 1"),
        ({"vocab_size": 96}, "96 ids in the model and 97 in"),
    ],
)
def test_settings_that_cannot_work(tokens_24, changes, message):
    with pytest.raises(ValueError, match=message):
        loader_of(tokens_24, **changes)


def test_3_sequences_for_4_workers(tmp_path):
    with pytest.raises(ValueError, match=r"global batch of 4 sequences \(4 workers x 1\), got 3 sequences"):
        loader_of(numbered(tmp_path, 3), num_workers=4)


def test_a_file_of_one_token(tmp_path):
    write_tokens(tmp_path / "one", [[5]], 257, "byte")
    file = open_tokens(tmp_path / "one")
    with pytest.raises(ValueError, match="got 0 sequences"):
        loader_of(file)
    with pytest.raises(ValueError, match=r"at least 2 tokens.*got 1"):
        eval_batches(file, 4, LENGTH)


def test_a_model_with_a_larger_vocabulary_is_fine(tokens_24):
    with loader_of(tokens_24, vocab_size=97) as loader:
        take(loader, 1)
    assert len(eval_batches(tokens_24, 4, LENGTH, vocab_size=128)) == 6
    with pytest.raises(ValueError, match="96 ids in the model and 97 in"):
        eval_batches(tokens_24, 4, LENGTH, vocab_size=96)


def targets(batches) -> list[int]:
    found = []
    for batch in batches:
        tokens, weight = batch["tokens"], batch["weight"]
        assert (tokens.dtype, weight.dtype) == (np.int32, np.float32)
        assert tokens.shape == (weight.shape[0], weight.shape[1] + 1)
        counted = weight == 1
        assert (counted | (weight == 0)).all()
        # The token before a counted target is the one before it in the file.
        assert (tokens[:, 1:] - tokens[:, :-1])[counted].tolist() == [1] * int(counted.sum())
        found += tokens[:, 1:][counted].tolist()
    return found


@given(sequences=st.integers(0, 20), extra=st.integers(0, LENGTH - 1), global_batch=st.integers(1, 6))
def test_evaluation_counts_every_target_once(tmp_path_factory, sequences, extra, global_batch):
    if sequences + extra == 0:
        extra = 1
    file = numbered(tmp_path_factory.mktemp("t"), sequences, extra)
    batches = eval_batches(file, global_batch, LENGTH)
    assert targets(batches) == list(range(1, len(file)))
    assert targets(batches) == list(range(1, len(file))), "a second pass must give the same"
    assert len(list(batches)) == len(batches) == math.ceil(math.ceil((len(file) - 1) / LENGTH) / global_batch)
    assert {batch["tokens"].shape for batch in batches} == {(global_batch, LENGTH + 1)}


def test_a_limited_evaluation_is_spread_over_the_file(tmp_path):
    file = numbered(tmp_path, 100, extra=3)
    batches = eval_batches(file, 4, LENGTH, max_batches=5)
    assert len(batches) == 5
    first = [row[0] // LENGTH for batch in batches for row in batch["tokens"]]
    assert first == [i * 101 // 20 for i in range(20)]
    assert targets(eval_batches(file, 4, LENGTH, max_batches=1000)) == list(range(1, len(file)))
    with pytest.raises(ValueError, match="max_batches must be >= 1, got 0"):
        eval_batches(file, 4, LENGTH, max_batches=0)


@pytest.mark.parametrize("extra", [0, 3])
def test_processes_share_an_evaluation_batch(tmp_path, extra):
    file = numbered(tmp_path, 9, extra)
    whole = list(eval_batches(file, 4, LENGTH))
    parts = [
        list(eval_batches(file, 4, LENGTH, num_workers=4, process_index=i, process_count=2)) for i in range(2)
    ]
    for name in ("tokens", "weight"):
        joined = [np.concatenate([a[name], b[name]]) for a, b in zip(*parts, strict=True)]
        np.testing.assert_array_equal(joined, [batch[name] for batch in whole])
    with pytest.raises(ValueError, match="6 sequences for 4 workers"):
        eval_batches(file, 6, LENGTH, num_workers=4)


def test_the_loader_is_far_faster_than_the_demo(tmp_path):
    """The demo trains on about 20 000 tokens/s; a loader may take 1/20 of its time at most."""
    write_tokens(tmp_path / "a", [np.arange(300_000) % 257], 257, "byte")
    with make_loader(
        open_tokens(tmp_path / "a"), global_batch=16, length=128, seed=0, num_workers=8, num_threads=0
    ) as loader:
        next(loader)
        best = min(_seconds(lambda: next(loader)) for _ in range(100))
    assert 16 * 128 / best > 20 * 20_000


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
