"""Steps of whole decoders: the same bits in every company, in CUDA graphs, and at the end of the caches.

On the CPU, where ONNX Runtime's products depend on the batch, the results are close. The models run there in
the form for CUDA.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from decoder_graphs import Sizes, write
from torch import Tensor

from twinop import deploy
from twinop.bench.runtime import bind, open_session
from twinop.optimize import optimize_folder

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = Sizes(width=256, inner=512, heads=4, kv_heads=2, vocab=512, context=1100)
LAYERS, SEQUENCES, ROWS = 3, 16, 320
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300, 319, 320, 5)
"""Keys of each sequence, with the new one."""
each_device = pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "float16"),
        *(pytest.param("cuda", each, marks=pytest.mark.cuda) for each in ("float16", "bfloat16", "int4")),
    ],
)
each_form = pytest.mark.parametrize(
    ("device", "precision"),
    [*each_device.args[1], pytest.param("cuda", "float8", marks=pytest.mark.cuda)],
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of an optimised decoder."""
    made = dict[str, Path]()

    def folder(precision: str) -> Path:
        if precision not in made:
            root = tmp_path_factory.mktemp(precision)
            options: dict[str, Any] = {"dtype": "float8", "max_error": 9.0} if precision == "float8" else {}
            source = write(root / "old", SIZES, "float16" if options else precision, LAYERS)
            report = optimize_folder(source, root / "new", device="cuda", **options)
            assert report.fused["attention over a cache"] == LAYERS and not report.reverted
            graph = onnx.load(root / "new/model.onnx", load_external_data=False).graph
            found = Counter(node.op_type for node in graph.node)
            assert found["CustomLastPosition"] == 1 and not {"ReduceSum", "Sub"} & found.keys()
            assert not options or found["CustomLinearW8"] == 3 * LAYERS - 1
            assert found["Cast"] == 1 + (precision == "bfloat16")  # of the mask's length; of the logits
            made[precision] = root / "new"
        return made[precision]

    return folder


class Decoder:
    """Runs steps of a decoder, in a CUDA graph or not."""

    def __init__(self, folder: Path, device: str, graph: bool = False) -> None:
        self.device, self.graph = torch.device(device), graph and device == "cuda"
        options: dict[str, Any] = {"cpu_threads": 1, "optimize": True, "fallback": True}
        self.session = open_session(folder / "model.onnx", self.device, cuda_graph=self.graph, **options)
        name = {each.name: each.type for each in self.session.get_inputs()}["past_key_values.0.key"]
        self.dtype = torch.bfloat16 if "bfloat16" in name else torch.float16

    def caches(self, batch: int, rows: int, guard: int = 0) -> dict[str, Tensor]:
        """Draws caches. `guard` elements of memory follow each."""
        random = torch.Generator().manual_seed(0)
        found = {}
        for i in range(LAYERS):
            for part in ("key", "value"):
                shape = (SEQUENCES, SIZES.kv_heads, 1100, SIZES.head)
                drawn = torch.randn(shape, generator=random)[:batch, :, :rows]
                memory = torch.full((drawn.numel() + guard,), 7.0, dtype=self.dtype, device=self.device)
                found[f"past_key_values.{i}.{part}"] = memory[: drawn.numel()].view(drawn.shape).copy_(drawn)
        return found

    def bound(self, tokens: Tensor, mask: Tensor, caches: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """Returns a step on this memory, which returns the memory of its logits."""
        feeds = {"input_ids": tokens, "attention_mask": mask, **caches}
        dtype = torch.float32 if self.dtype is torch.bfloat16 else self.dtype
        logits = torch.empty(*tokens.shape, SIZES.vocab, dtype=dtype, device=self.device)
        outputs = {name.replace("past_key_values", "present"): each for name, each in caches.items()}
        step = bind(self.session, feeds, {"logits": logits} | outputs, graph=0 if self.graph else None)
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None

        def run() -> Tensor:
            wait()  # ONNX Runtime has a stream of its own
            step()
            wait()
            return logits

        return run

    def __call__(self, tokens: Tensor, mask: Tensor, caches: Mapping[str, Tensor]) -> Tensor:
        own = {name: each.clone() for name, each in caches.items()}
        return self.bound(tokens.contiguous(), mask.contiguous(), own)()

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Tokens, a mask with padding on the right, and caches whose rows beyond a sequence are NaN."""
        tokens = torch.arange(3, 3 + SEQUENCES, device=self.device)[:, None]
        lengths = torch.tensor(LENGTHS, device=self.device)[:, None]
        mask = (torch.arange(ROWS, device=self.device) < lengths).long()
        caches = self.caches(SEQUENCES, ROWS)
        for each in caches.values():
            each.masked_fill_(mask[:, None, :, None] == 0, torch.nan)
        return tokens, mask, caches


def same(found: Tensor, expected: Tensor) -> bool:
    if found.is_cuda:
        return torch.equal(found, expected)
    return torch.allclose(found.float(), expected.float(), rtol=0, atol=1e-2 * float(expected.abs().max()))


@each_form
def test_the_same_bits_in_every_company(device: str, precision: str, decoder: Callable[[str], Path]) -> None:
    steps = Decoder(decoder(precision), device)
    tokens, mask, caches = steps.sequences
    alone = []
    for i, length in enumerate(LENGTHS):  # in caches without rows to spare
        mine = {name: each[i : i + 1, :, :length].contiguous() for name, each in caches.items()}
        alone.append(steps(tokens[i : i + 1], mask[i : i + 1, :length], mine))
    expected = torch.cat(alone)
    assert expected.isfinite().all() and len({row.sum().item() for row in expected}) == SEQUENCES

    def run(chosen: Tensor, mask: Tensor = mask, caches: Mapping[str, Tensor] = caches) -> Tensor:
        return steps(tokens[chosen], mask[chosen], {name: each[chosen] for name, each in caches.items()})

    everyone = torch.arange(SEQUENCES, device=device)
    for batch in (2, 3, 7, 8, 9, SEQUENCES) if device == "cuda" else (3,):
        assert same(run(everyone[:batch]), expected[:batch]), batch
        assert same(run(everyone[-batch:]), expected[-batch:]), batch
    turned = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(1)).to(device)
    assert same(run(turned), expected[turned])
    many = (17, 31, 32, 33, 64) if device == "cuda" else (33,)
    for chosen in (everyone[:1].expand(5), *(everyone.repeat(4)[:rows] for rows in many)):
        assert same(run(chosen), expected[chosen]), len(chosen)
    assert same(run(everyone, mask.flip(1)), expected)  # padding on the left
    clean = {name: each.nan_to_num(3.0) for name, each in caches.items()}
    assert same(run(everyone, caches=clean), expected)  # other garbage


@each_form
def test_1000_steps(device: str, precision: str, decoder: Callable[[str], Path], gpu_alone: None) -> None:
    """A graph, whose mask has the length of the caches, and steps without one, whose mask grows, agree."""
    count = 1000 if device == "cuda" else 8
    steps, batch = Decoder(decoder(precision), device, graph=True), 3
    caches = steps.caches(batch, count)
    tokens = torch.tensor([[3], [4], [5]], device=device)
    mask = torch.zeros(batch, count, dtype=torch.int64, device=device)
    run = steps.bound(tokens, mask, caches)
    said = torch.empty(count, batch, 1, dtype=torch.int64, device=device)
    found = torch.empty(count, batch, 1, SIZES.vocab, device=device)
    free = []
    for step in range(count):
        mask[:, step] = 1
        said[step] = tokens
        found[step] = run()
        tokens.copy_((found[step].argmax(-1) + step) % SIZES.vocab)  # no circle of tokens
        if device == "cuda" and step in (count // 10, count - 1):
            free.append(torch.cuda.mem_get_info()[0])
    assert len(set(free)) <= 1, "memory leaks"
    assert len({row.sum().item() for row in found[:, 0]}) > count // 2  # the steps differ
    plain = Decoder(decoder(precision), device)
    again = steps.caches(batch, count)
    for step in range(count):
        logits = plain.bound(said[step], mask[:, : step + 1].contiguous(), again)()
        assert same(logits.float(), found[step]), step
    for name, each in caches.items():
        assert same(again[name], each), name


@pytest.mark.cuda
def test_a_session_captures_steps_over_given_caches(decoder: Callable[[str], Path], gpu_alone: None) -> None:
    """Steps of a captured graph and of a session without one agree, also when the batch shrinks."""
    folder, whole = decoder("float16"), 3
    found = list[list[Tensor]]()
    for graph in (False, True):
        files: Any = folder / "model.onnx", ["CUDAExecutionProvider"], folder / "libcustom_ops.so"
        session = deploy.session(*files, enable_cuda_graph=graph)
        caches = Decoder(folder, "cuda").caches(whole, 1024)
        places = {name: each.data_ptr() for name, each in caches.items()}
        mask = torch.zeros(whole, 1024, dtype=torch.int64, device="cuda")
        logits, free, peaks = list[Tensor](), [], []
        for step, batch in enumerate((3, 3, 3, 3, 3, 2, 2, 3)):
            mask[:, step] = 1
            given = {name: each[:batch] for name, each in caches.items()}
            tokens = torch.tensor([[3], [4], [5]], device="cuda")[:batch] + step
            feeds = {"input_ids": tokens, "attention_mask": mask[:batch], **given}
            outputs = {name.replace("past_key_values", "present"): each for name, each in given.items()}
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            logits.append(session.run(feeds, {"logits": None} | outputs)["logits"])
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            free.append(torch.cuda.mem_get_info()[0])
        found.append(logits + list(caches.values()))
        assert places == {name: each.data_ptr() for name, each in caches.items()}
        if graph:
            cache = min(each.nbytes for each in caches.values())
            assert len(session._tensors._graphs) == 2
            assert max(peaks[1:5] + peaks[6:]) < cache and len(set(free[2:5])) == 1
    assert all(map(torch.equal, *found))
    assert len({each.float().sum().item() for each in found[0][:8]}) == 8  # the steps differ


@each_device
def test_nothing_is_written_past_the_end(device: str, precision: str, decoder: Callable[[str], Path]) -> None:
    """A sequence beyond its caches gives NaN, also in a replayed graph; others stay right."""
    steps, batch, rows = Decoder(decoder(precision), device, graph=True), 3, 24
    caches = steps.caches(batch, rows, guard=4096)
    tokens = torch.tensor([[3], [4], [5]], device=device)
    mask = torch.ones(batch, rows, dtype=torch.int64, device=device)
    run = steps.bound(tokens, mask, caches)
    expected, whole = run().clone(), {name: each.clone() for name, each in caches.items()}
    mask[1] = 2  # its sum is the length, which the graph reads
    for _ in range(3):
        logits = run()
    assert logits[1].isnan().all()
    assert torch.equal(logits[::2], expected[::2])
    for name, each in caches.items():
        assert torch.equal(each, whole[name]), name
        after = each.new_empty(0).set_(each.untyped_storage())[each.numel() :]
        assert len(after) == 4096 and (after == 7).all(), name


@each_device
def test_prompts_have_the_same_bits_in_every_company(device: str, precision: str, tmp_path: Path) -> None:
    """With `invariant`: alone, in a batch at each place, beside longer ones, and in two parts."""
    folder = write(tmp_path / "old", SIZES, precision, LAYERS)
    report = optimize_folder(folder, tmp_path / "new", device="cuda", invariant=True)
    assert report.fused["invariant matmuls"] == 4 * LAYERS + 1 and not report.skipped and not report.reverted
    model, most, lengths = Decoder(tmp_path / "new", device), 40, (40, 23, 31)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, SIZES.vocab, (3, most), generator=random).to(device)
    mask = (torch.arange(most) < torch.tensor(lengths)[:, None]).long().to(device)

    def run(tokens: Tensor, mask: Tensor, caches: Mapping[str, Tensor]) -> Tensor:
        return model.bound(tokens.contiguous(), mask.contiguous(), caches)()

    full = torch.ones_like(mask)
    alone = [run(tokens[i : i + 1], full[:1], model.caches(1, most)) for i in range(3)]
    expected = torch.cat(alone)
    assert expected.isfinite().all() and len({row.sum().item() for row in expected}) == 3
    for chosen in ([0, 1, 2], [2, 0, 1], [1, 2], [0, 0, 1, 1, 2]):
        found = run(tokens[chosen], full[:1].expand(len(chosen), -1), model.caches(len(chosen), ROWS))
        assert same(found, expected[chosen]), chosen
    padded = run(tokens, mask, model.caches(3, ROWS))
    for i, length in enumerate(lengths):
        assert same(padded[i, :length], expected[i, :length]), length
    caches = model.caches(1, most)
    parts = [run(tokens[:1, start:stop], full[:1, :stop], caches) for start, stop in ((0, 17), (17, most))]
    assert same(torch.cat(parts, 1), expected[:1])
