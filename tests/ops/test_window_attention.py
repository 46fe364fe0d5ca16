"""Window attention as a union of dense attentions: values, coverage, gradients."""

import pytest
import torch
from torch.autograd import gradcheck

from diffusers_h3.ops.window_attention import window_attention


GROUPS = (
    (((0, 2), (7, 9)), ((0, 9),)),
    (((2, 4),), ((0, 4), (7, 9))),
    (((4, 7),), ((0, 1), (3, 9))),
)


def _attention(query, key, value):
    weights = torch.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("bhts,bshd->bthd", weights.softmax(-1), value)


def _mask():
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[[0, 1, 7, 8]] = True
    mask[2:4] = torch.tensor([1, 1, 1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    mask[4:7] = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    return mask


def test_window_equals_masked_attention(draw):
    query, key, value = (draw(2, 9, 3, 4) for _ in range(3))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / 2.0
    expected = torch.einsum("bhts,bshd->bthd", scores.masked_fill(~_mask(), -torch.inf).softmax(-1), value)
    output = window_attention(query, key, value, GROUPS, _attention)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    gate = draw(2, 9, 3)
    gated = window_attention(query, key, value, GROUPS, _attention, gate)
    torch.testing.assert_close(gated, expected / (1 + torch.exp(-gate[..., None])), rtol=1e-12, atol=1e-12)


def test_every_group_is_called_once_with_its_rows(draw):
    query, key, value = (draw(1, 9, 1, 2) for _ in range(3))
    calls = []

    def attention(query, key, value):
        calls.append((query.shape[1], key.shape[1], value.shape[1]))
        return query

    output = window_attention(query, key, value, GROUPS, attention)
    assert calls == [(4, 9, 9), (2, 6, 6), (3, 7, 7)]
    assert torch.equal(output, query)


def test_gradients(draw):
    tensors = (*(draw(1, 9, 1, 2, requires_grad=True) for _ in range(3)), draw(1, 9, 1, requires_grad=True))
    assert gradcheck(lambda *tensors: window_attention(*tensors[:3], GROUPS, _attention, tensors[3]), tensors)


@pytest.mark.parametrize(
    "queries",
    [
        [((0, 4),), ((5, 9),)],
        [((0, 5),), ((4, 9),)],
        [((0, 8),)],
        [((1, 9),)],
        [((0, 9),), ((0, 9),)],
        [((0, 10),)],
    ],
    ids=str,
)
def test_groups_that_do_not_cover_the_rows_once_are_refused(queries, draw):
    query = draw(1, 9, 1, 2)
    groups = tuple((ranges, ((0, 9),)) for ranges in queries)
    with pytest.raises(ValueError, match=r"do not cover .*rows .*exactly once"):
        window_attention(query, query, query, groups, _attention)
