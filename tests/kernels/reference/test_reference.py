"""kernels/reference/ and torch_ops.py against transformers' code and plain loops in float64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import expected_attention, make_case
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from twofold.kernels import reference
from twofold.kernels.torch_attention import sdpa_attention

LENGTHS = [
    [(1, 1)],
    [(5, 5)],
    [(1, 17), (1, 16), (1, 33)],
    [(3, 20), (1, 1), (16, 16), (1, 40), (7, 50)],
]


def test_rms_norm_is_transformers_for_llama_and_gemma():
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    llama, gemma = LlamaRMSNorm(24, eps=1e-5), GemmaRMSNorm(24, eps=1e-5)
    torch.nn.init.normal_(llama.weight), torch.nn.init.normal_(gemma.weight)
    with torch.no_grad():
        torch.testing.assert_close(reference.rms_norm(x, llama.weight, 1e-5), llama(x))
        torch.testing.assert_close(reference.rms_norm(x, gemma.weight, 1e-5, offset=1.0), gemma(x))
        normed, total = reference.add_rms_norm(x, x * 0.5, llama.weight, 1e-5)
        torch.testing.assert_close(total, x * 1.5)
        torch.testing.assert_close(normed, llama(x * 1.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_float_input_is_computed_in_float32(dtype):
    x = (torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    weight = torch.ones(512, dtype=dtype)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6), expected.to(dtype))


def test_rope_halves_is_transformers():
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(6, 4, 16, generator=generator), torch.randn(6, 2, 16, generator=generator)
    positions = torch.tensor([0, 3, 9, 1, 1, 7])
    angles = torch.outer(torch.arange(10.0), 10000 ** -(torch.arange(0, 16, 2) / 16))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    cos, sin = (torch.cat((part, part), -1)[positions][None] for part in (angles.cos(), angles.sin()))
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    out_q, out_k = reference.rope(q, k, table, positions, False)
    torch.testing.assert_close(out_q, expected_q[0].transpose(0, 1))
    torch.testing.assert_close(out_k, expected_k[0].transpose(0, 1))


@pytest.mark.parametrize("rotary", [16, 8])
def test_rope_interleaved_is_complex_multiplication_of_the_first_features(rotary):
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(3, 4, 16, generator=generator), torch.randn(3, 1, 16, generator=generator)
    angles = torch.rand(5, rotary // 2, generator=generator)
    positions = torch.tensor([4, 0, 2])
    out_q, out_k = reference.rope(q, k, torch.cat((angles.cos(), angles.sin()), -1), positions, True)
    turn = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    for before, after in ((q, out_q), (k, out_k)):
        pairs = torch.view_as_complex(before[..., :rotary].reshape(*before.shape[:2], -1, 2).contiguous())
        torch.testing.assert_close(after[..., :rotary], torch.view_as_real(pairs * turn).flatten(-2))
        torch.testing.assert_close(after[..., rotary:], before[..., rotary:])


def test_gated_activations():
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(3)).double()
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(reference.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
    exact = 0.5 * gate * (1 + torch.erf(gate / 2**0.5))
    torch.testing.assert_close(reference.gelu_and_mul(x, "none"), exact * up)
    torch.testing.assert_close(reference.gelu_and_mul(x, "tanh"), ACT2FN["gelu_pytorch_tanh"](gate) * up)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, 0.0), (5, 0.0), (None, 2.5), (1, 1.5)])
def test_paged_attention(lengths, window, soft_cap):
    case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=8, block_size=16, seed=len(lengths))
    expected = expected_attention(case, 0.4, window, soft_cap).float()
    arguments = (case.query, case.cache, case.batch, 0.4, window, soft_cap)
    torch.testing.assert_close(reference.paged_attention(*arguments), expected, atol=2e-5, rtol=1e-4)
    if not soft_cap:
        torch.testing.assert_close(sdpa_attention(*arguments), expected, atol=2e-5, rtol=1e-4)


def test_write_kv_reaches_the_slots_and_nothing_else():
    case = make_case([(3, 20), (1, 5)], num_heads=2, num_kv_heads=2, head_size=4, block_size=8)
    key, value = torch.full((4, 2, 4), 7.0), torch.full((4, 2, 4), 8.0)
    before = case.key_cache.clone()
    reference.write_kv(key, value, case.cache, case.batch.slot_mapping)
    flat = case.key_cache.reshape(-1, 2, 4)
    torch.testing.assert_close(flat[case.batch.slot_mapping], key)
    torch.testing.assert_close(case.value_cache.reshape(-1, 2, 4)[case.batch.slot_mapping], value)
    others = torch.ones(flat.shape[0], dtype=torch.bool)
    others[case.batch.slot_mapping] = False
    torch.testing.assert_close(flat[others], before.reshape(-1, 2, 4)[others], equal_nan=True)


def test_copy_blocks_reads_all_sources_first():
    cache = torch.arange(5.0)[:, None, None, None].expand(5, 2, 1, 3).clone()
    reference.copy_blocks([cache], [(1, 2), (2, 4)])
    assert cache[:, 0, 0, 0].tolist() == [0, 1, 1, 3, 2]
    reference.copy_blocks([cache], [])
    assert cache[:, 0, 0, 0].tolist() == [0, 1, 1, 3, 2]
