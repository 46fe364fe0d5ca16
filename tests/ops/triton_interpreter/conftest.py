"""Shared by the interpreter's suites: a card's rounding, poisoned allocations, recorded launches, an error measure."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


# B, F, S, H, D: single rows and frames, lengths that no tile divides, head dimensions below, at and between powers of
# two, and clips of many frames.
SIZES = (
    (1, 1, 1, 1, 16),
    (2, 2, 7, 3, 32),
    (1, 3, 63, 1, 48),
    (1, 5, 100, 1, 16),
    (1, 51, 7, 1, 64),
    (1, 2, 100, 1, 128),
    (1, 41, 1, 1, 16),
)

# What float32 statistics and states may differ from float64 by, and the factor on the eager path's own error.
FLOAT32_LIMIT = 1e-5
EAGER_FACTOR = 1.5


@pytest.fixture(params=SIZES, ids=lambda size: "x".join(map(str, size)))
def size(request):
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def _computes_like_a_card(monkeypatch):
    """Give the interpreter bfloat16 as a card has it.

    NumPy has none, so the interpreter holds its bits as integers. It rounds float32 by cutting bits off, which doubles
    the error, and multiplies matrices of bits. Here it rounds to nearest even and multiplies values.
    """
    builder = interpreter.InterpreterBuilder
    cast_impl, create_dot = builder.cast_impl, builder.create_dot

    def cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(src.data, np.float32)).bfloat16()
            return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target)
        if (source, target) == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), target)
        return cast_impl(self, src, dst_type)

    def dot(self, a, b, d, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, operand, tl.float32) for operand in (a, b))
        return create_dot(self, a, b, d, *options)

    monkeypatch.setattr(builder, "cast_impl", cast)
    monkeypatch.setattr(builder, "create_dot", dot)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Fill every allocation with NaN, so that an element no kernel writes cannot pass."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """The names of the kernels launched so far."""
    names = []
    call = interpreter.GridExecutor.__call__

    def recording(self, *arguments, **options):
        names.append(self.fn.__name__)
        return call(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recording)
    return names


@pytest.fixture
def agrees(launches):
    """A function comparing an operator with float64 and, for half-precision results, with the eager path's error.

    It takes the operator, its arguments, the kernels it must launch and the eager reference. In float64 the operator
    itself runs the reference, which `tests/ops` and `tests/hybrid` compare with the formulas.
    """

    def check(operator, arguments, kernels, eager=None):
        launches.clear()
        actual = _tuple(operator(*arguments))
        assert launches == kernels
        exact = _tuple(operator(*map(_double, arguments)))
        assert launches == kernels, "float64 launched a kernel"
        rounded = [None] * len(exact) if eager is None else _tuple(eager(*arguments))
        for one, two, three in zip(actual, exact, rounded, strict=True):
            assert one.shape == two.shape
            limit = FLOAT32_LIMIT if one.dtype == torch.float32 else 0.0
            if three is not None:
                assert one.dtype == three.dtype
                limit = max(limit, EAGER_FACTOR * _error(three, two))
            assert _error(one, two) <= limit  # a NaN fails too

    return check


def _tuple(result):
    return result if isinstance(result, tuple) else (result,)


def _double(argument):
    return argument.double() if isinstance(argument, torch.Tensor) else argument


def _error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm()).item()
