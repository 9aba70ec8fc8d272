"""Batch invariance: the logits of a row are the same bits whatever else the step computes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.reference.checkpoint import load_weights
from dynamo_elastic.engine.reference.experts import LocalExperts, weighted_sum
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.layout import DENSE, slot_prefix
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.reference.model import Model, Routing, Row, TileSize, Weights
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.testing.engine_process import SMALL_SHAPE

TILE = TileSize(batch_tokens=4, max_context=32)
EXPERTS = SMALL_SHAPE.num_experts
PROMPTS = [[5, 9, 2, 60, 33, 1, 7], [5, 9, 2, 60], [8, 8, 8, 8, 8, 8, 8, 8, 8], [1], [40, 41]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SMALL_SHAPE, seed=1)
    return directory


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir, TILE)


class Shuffled:
    """A whole model whose experts lie in any order of slots, and whose rows are mixed at will."""

    def __init__(self, model_dir: Path, order: list[int]) -> None:
        torch.set_num_threads(1)
        weights = Weights(SMALL_SHAPE, len(order))
        load_weights(model_dir, weights, order)
        self.model = Model(weights, TILE)
        self.cache = KvCache(SMALL_SHAPE, blocks=20)
        self._local = LocalExperts(weights, TILE.batch_tokens)
        self._order = order

    def step(self, rows: list[Row]) -> Tensor:
        return self.model.forward(rows, self.cache, self._experts)

    def _experts(self, routing: Routing) -> Tensor:
        """All rows of one expert together in one tile, unlike the oracle's one by one."""
        computed = torch.zeros(*routing.experts.shape, routing.hidden.shape[1])
        for slot, expert in enumerate(self._order):
            at = (routing.experts[: routing.live] == expert).nonzero(as_tuple=True)
            if len(at[0]):
                rows = routing.hidden[at[0]]
                computed[at] = self._local.compute(slot, routing.layer, rows)
        return weighted_sum(computed, routing.weights)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_logits_do_not_depend_on_the_batch(seed: int, model_dir: Path, oracle: Oracle) -> None:
    chance = random.Random(seed)
    shuffled = Shuffled(model_dir, chance.sample(range(EXPERTS), EXPERTS))
    free = chance.sample(range(1, 21), 20)
    blocks = [[free.pop(), free.pop()] for _ in PROMPTS]
    done = [0] * len(PROMPTS)
    while any(n < len(p) for n, p in zip(done, PROMPTS, strict=True)):
        rows: list[tuple[int, Row]] = []
        for i in chance.sample(range(len(PROMPTS)), len(PROMPTS)):
            left = min(len(PROMPTS[i]) - done[i], TILE.batch_tokens - len(rows))
            for _ in range(chance.randint(0, left)):
                rows.append((i, Row(PROMPTS[i][done[i]], done[i], blocks[i])))
                done[i] += 1
        logits = shuffled.step([row for _, row in rows])
        for at, (i, row) in enumerate(rows):
            if row.position == len(PROMPTS[i]) - 1:
                assert torch.equal(logits[at], oracle.logits(PROMPTS[i]))


def test_the_oracle_agrees_with_plain_float64(model_dir: Path, oracle: Oracle) -> None:
    shape = SMALL_SHAPE
    weights = Weights(shape, EXPERTS)
    load_weights(model_dir, weights, range(EXPERTS))
    w = {name: tensor.double() for name, tensor in weights.tensors.items()}
    tokens = PROMPTS[0]
    plain = _plain_logits(w, tokens)
    torch.testing.assert_close(oracle.logits(tokens).double(), plain, atol=1e-4, rtol=1e-4)


def _plain_logits(w: dict[str, Tensor], tokens: list[int]) -> Tensor:
    shape, n = SMALL_SHAPE, len(tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], w[name], shape.rms_norm_eps)

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up @ x).chunk(2)
        return down @ (functional.silu(gate) * up)

    half = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
    angle = torch.arange(n).double()[:, None] * shape.rope_theta**-half
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = w["dense/embed"][tokens]
    for layer in range(shape.num_hidden_layers):
        at = f"dense/layers.{layer}."
        qkv = (norm(x, f"{at}input_norm") @ w[f"{at}qkv"].T).view(n, -1, shape.head_dim)
        heads, kv = shape.num_attention_heads, shape.num_key_value_heads
        q, k, v = rotate(qkv[:, :heads]), rotate(qkv[:, heads : heads + kv]), qkv[:, heads + kv :]
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        x = x + mixed.transpose(0, 1).reshape(n, -1) @ w[f"{at}o"].T
        normed = norm(x, f"{at}post_norm")
        chances = (normed @ w[f"{at}router"].T).softmax(-1)
        added = torch.zeros_like(x)
        for row in range(n):
            best, experts = chances[row].topk(shape.num_experts_per_tok)
            for share, e in zip(best / best.sum(), experts.tolist(), strict=True):
                slot = f"slot{e}/layers.{layer}."
                added[row] += share * mlp(normed[row], w[f"{slot}gate_up"], w[f"{slot}down"])
            added[row] += mlp(normed[row], w[f"{at}shared_gate_up"], w[f"{at}shared_down"])
        x = x + added
    return w["dense/lm_head"] @ norm(x, "dense/norm")[-1]


def test_running_the_same_rows_again_changes_nothing(model_dir: Path) -> None:
    engine = Shuffled(model_dir, list(range(EXPERTS)))
    rows = [Row(token, at, [3]) for at, token in enumerate(PROMPTS[1])]
    first = engine.step(rows).clone()
    assert torch.equal(engine.step(rows), first)


def test_tokens_go_on_where_they_were_interrupted(oracle: Oracle) -> None:
    whole = oracle.generate(Request("a", (1, 2, 3), 12, seed=9))
    rest = oracle.generate(Request("b", (1, 2, 3, *whole[:5]), 7, seed=9))
    assert rest == whole[5:]
    assert len(set(whole)) > 4
    assert whole != oracle.generate(Request("c", (1, 2, 3), 12, seed=10))


def test_greedy_and_stop(oracle: Oracle) -> None:
    greedy = oracle.generate(Request("a", (1, 2, 3), 6, seed=1, temperature=0.0))
    assert greedy == oracle.generate(Request("a", (1, 2, 3), 6, seed=2, temperature=0.0))
    stopped = oracle.generate(Request("a", (1, 2, 3), 6, temperature=0.0, stop_tokens=(greedy[2],)))
    assert stopped == greedy[: greedy.index(greedy[2]) + 1]


def test_a_file_that_does_not_fit_is_refused(model_dir: Path, tmp_path: Path) -> None:
    weights = Weights(SMALL_SHAPE, 1)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_weights(tmp_path, weights, [0])
    with pytest.raises(ConfigError, match="does not fit"):
        load_weights(model_dir, weights, [EXPERTS])


def digest(weights: Weights, name: str) -> str:
    return weights.digests([name])[name]


def test_seeded_weights_are_a_function_of_the_seed_and_the_expert(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL_SHAPE, seed=4, in_file=False)
    first, second = Weights(SMALL_SHAPE, 2), Weights(SMALL_SHAPE, 2)
    load_weights(tmp_path, first, [3, 5])
    load_weights(tmp_path, second, [5, 1])
    assert digest(first, "slot1/layers.0.down") == digest(second, "slot0/layers.0.down")
    assert digest(first, "slot0/layers.0.down") != digest(first, "slot1/layers.0.down")
    assert digest(first, "dense/lm_head") == digest(second, "dense/lm_head")
    write_model(tmp_path, SMALL_SHAPE, seed=5, in_file=False)
    load_weights(tmp_path, second, [5, 1])
    assert digest(first, "dense/lm_head") != digest(second, "dense/lm_head")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('weights": 5', 'weights": "5"'))
    with pytest.raises(ConfigError, match="seeded_weights"):
        load_weights(tmp_path, second, [5, 1])


def test_a_slot_is_one_piece_with_all_its_weights() -> None:
    weights = Weights(SMALL_SHAPE, 3)
    spans = [weights.slot(slot) for slot in range(3)]
    assert len({span.size_bytes for span in spans}) == 1
    for before, after in pairwise(spans):
        assert before.offset + before.size_bytes <= after.offset
    for slot, span in enumerate(spans):
        inside = [r for r in weights.arena.regions if r.name.startswith(slot_prefix(slot))]
        assert min(r.offset for r in inside) == span.offset
        assert max(r.offset + r.size_bytes for r in inside) == span.offset + span.size_bytes


def test_the_digest_of_a_slot_is_that_of_every_weight_in_it() -> None:
    weights = Weights(SMALL_SHAPE, 2)
    name = weights.slot(1).name
    seen = {weights.digests([name])[name]}
    for piece, tensor in weights.tensors.items():
        if piece.startswith(name):
            tensor.view(-1)[-1] = 1.0
            seen.add(weights.digests([name])[name])
    assert len(seen) == 1 + sum(piece.startswith(name) for piece in weights.tensors)
    weights.tensors[DENSE + "norm"].fill_(2.0)
    assert weights.digests([name])[name] in seen
