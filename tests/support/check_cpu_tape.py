"""A recorded step of most kernels, for ``check_cpu_library.py``."""

from __future__ import annotations

import torch
from attention_cases import make_case
from twofold.kernels.cpu import elementwise, embedding, fused, linear, route, sampling, tape
from twofold.quant.canonical import DenseWeight, PackedWeight, pack
from twofold.quant.scheme import WeightOnly


def check_tape() -> None:
    """Replays over changed inputs, then with requests of length 0 behind the first."""
    norm, ids, positions = torch.rand(64), torch.tensor([3, 59, 0]), torch.tensor([70, 0, 1])
    cos_sin, columns = torch.randn(512, 16), torch.randperm(64)
    codes = pack(torch.randint(0, 64, (60, 64)), 6)
    table = PackedWeight(WeightOnly(6, 16), (60, 64), codes, torch.randn(60, 4).to(torch.float16))
    case = make_case([(1, 71), (1, 1), (1, 2)], num_heads=2, num_kv_heads=2, head_size=16, block_size=16)
    panels = linear.prepare_dense(DenseWeight(torch.randn(96, 64)), torch.float32)
    square = linear.prepare_dense(DenseWeight(torch.randn(64, 32)), torch.float32)

    def step() -> tuple[torch.Tensor, ...]:
        x = (embedding.embed_packed(ids, table) * 3.0).index_select(1, columns)
        qkv = linear.run(elementwise.rms_norm(x, norm, 1e-6), panels)
        mixed = fused.rope_write_attend(qkv, cos_sin, positions, case.cache, case.batch, 0.3)
        normed, total = elementwise.add_rms_norm(linear.run(mixed, square), x, norm, 1e-6)
        routing, chosen = route.moe_route(normed[:, :5], 2)
        gates = torch.cat([elementwise.silu_and_mul(normed), elementwise.gelu_and_mul(total)], dim=-1)
        gates = elementwise.sigmoid_gate(gates, routing[:, :1].clone())
        return elementwise.soft_cap(gates, 2.0), routing, chosen, sampling.argmax(gates)

    recorded = tape.TapeRecorder().record(step)
    for shift in (0, 5):
        ids.copy_((ids + shift) % 60)
        expected = step()
        recorded.replay()
        assert all(torch.equal(got, wanted) for got, wanted in zip(recorded.outputs, expected, strict=True))
    whole = [part.clone() for part in recorded.outputs]
    case.batch.seq_lens[1:] = 0
    case.batch.slot_mapping[1:] = -1
    recorded.replay()
    assert all(torch.equal(got[0], wanted[0]) for got, wanted in zip(recorded.outputs, whole, strict=True))
    assert bool(recorded.outputs[0].isfinite().all())
