"""An output that a node omits is not written, and the others keep their bits."""

import pytest
from same_bits import assert_same_bits
from samples import DEVICES, RECORDS

from twinop.testing.one_node import make_session, one_node_model, poisoned, run_bound
from twinop.testing.samples import run_in_torch, samples, wide_samples
from twinop.testing.under_test import library_of

OPTIONAL = [name for name, record in RECORDS.items() if record.optional_outputs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONAL)
def test_the_others_keep_their_bits(name: str, device: str) -> None:
    record = RECORDS[name]
    others = tuple(each for each in record.outputs if each not in record.optional_outputs)
    assert record.outputs[: len(others)] == others
    for dtypes in (record.combinations[0], record.combinations[-1]):
        sessions = {}
        for sample in (*samples(record, dtypes), *wide_samples(record, dtypes)):
            sample = sample.to(device)
            present = [given is not None for given in sample.inputs.values()]
            key = f"{present}{sample.attributes}"
            if key not in sessions:
                model = one_node_model(record, dtypes, present, sample.attributes)
                del model.graph.node[0].output[len(others) :], model.graph.output[len(others) :]
                sessions[key] = make_session(model, library_of(record), device)
            expected = run_in_torch(record, sample)
            found = {output: poisoned(each) for output, each in zip(others, expected, strict=False)}
            run_bound(sessions[key], sample.tensors(), found)
            for output, each in zip(others, expected, strict=False):
                assert_same_bits(found[output], each, f"{name} {output} {dtypes}")
