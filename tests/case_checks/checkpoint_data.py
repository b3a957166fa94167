"""Checks for `tests/cases/checkpoint_data.yaml`."""

import numpy as np

from moejax.config_load import config_from_dict
from moejax.data import Dataset, train_iterator
from moejax.data.store import TokenStore
from moejax.data.tokenizer import ByteTokenizer


def data_order_survives_resume(case):
    given = case["given"]
    # Documents of exactly one sample each, so that a sample's second token says which document it is.
    length, samples = 4, given["samples"]
    tokens = np.stack([np.full(length, document, np.uint16) for document in range(samples)])
    tokens[:, 0] = ByteTokenizer.bos
    store = TokenStore(tokens.reshape(-1), np.arange(samples + 1) * length, num_bytes=samples * (length - 1))
    dataset = Dataset(store, store, ByteTokenizer(), ByteTokenizer.vocab_size, folder=None)
    config = config_from_dict({"training": {"global_batch": given["global_batch"], "sequence_length": length}})

    def ids(readers, restart_after, readers_after):
        """Ids of every global batch, the readers' rows side by side; all readers are replaced after one step."""
        seen, state = [], None
        for count, steps in ((readers, range(restart_after)), (readers_after, range(restart_after, given["steps"]))):
            iterators = [train_iterator(dataset, config, process, count) for process in range(count)]
            for iterator in iterators:
                if state is not None:
                    iterator.set_state(state)
            for _ in steps:
                rows = np.concatenate([next(iterator)["token"][:, 1] for iterator in iterators])
                seen.extend(rows.tolist())
            states = [iterator.get_state() for iterator in iterators]
            assert all(each == states[0] for each in states), "the position is one number, the same for every reader"
            state = states[0]
        return seen

    undisturbed = ids(1, given["steps"], 1)
    assert len(undisturbed) == given["global_batch"] * given["steps"]
    epochs = [tuple(undisturbed[i : i + samples]) for i in range(0, len(undisturbed), samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)
    for before, after in given["readers_before_and_after"]:
        for restart in given["restart_after_each_of"]:
            assert ids(before, restart, after) == undisturbed, (before, after, restart)


CHECKS = {"data-order-survives-resume": data_order_survives_resume}
