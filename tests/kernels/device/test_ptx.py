"""PTX of element functions: what it may say, what is refused, and where it is kept."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from daskps import optim
from daskps.kernels.device import libdevice, ptx
from daskps.kernels.device.pieces import look_loop, update_loop
from tests.kernels.compiling import kept
from tests.kernels.device.assembling import assemble, faults
from tests.kernels.device.launching import Launcher, kernel_of
from tests.kernels.device.test_updates import CASES


class Gamma(optim.Rule):
    def prepare(self, step, lr):
        return (lr,)

    @staticmethod
    def update(w, g, lr):
        return w - lr * math.gamma(abs(g) + 1)


class Remainder(Gamma):
    @staticmethod
    def update(w, g, lr):
        return w - lr * (g % 2)


class Exponential(Gamma):
    @staticmethod
    def update(w, g, lr):
        return (
            w * np.exp(-lr * abs(g)) + math.tanh(g) * abs(g) ** 0.3 + np.log1p(abs(g))
        )


def loop(rule, dtype="f4", gradient=None):
    kernel = kernel_of(rule, dtype, Launcher())
    return update_loop(kernel.rule, np.dtype(gradient or dtype))


def test_every_operation_of_rules_says_how_it_rounds(tmp_path):
    loops = {loop(rule, dtype) for rule, dtype in CASES}
    loops |= {look_loop(np.dtype(dtype)) for dtype in ("f2", "f4", "f8")}
    texts = [one.ptx(kept()) for one in loops]
    assert len(texts) > 40
    assert [fault for text in texts for fault in faults(text)] == []
    for text in texts:
        assert ".version 6.3\n.target sm_75\n" in text
    assemble(texts, tmp_path)


def planted(rule, change):
    """Return the faults of a rule whose LLVM code was changed."""
    one = loop(rule)
    code = ptx.element_code(one)
    other = change(code)
    assert other != code
    return faults(ptx.to_ptx(other, one))


def test_a_fused_multiply_is_found():
    rule = optim.SGD(0.1, momentum=0.9)
    assert not planted(rule, lambda code: code + "\n")
    assert planted(
        rule, lambda code: re.sub(r" f(mul|add|sub) ", r" f\1 contract ", code)
    )
    fused = "declare float @llvm.fma.f32(float, float, float)\n"
    with pytest.raises(TypeError, match=r"mine calls 'llvm\.fma\.f32'"):
        ptx.check(fused, "mine")


def test_fast_arithmetic_is_found():
    # A quotient alone is as exact as any with some releases of LLVM.
    fast = re.compile(r" f(div|mul|add|sub) ")
    assert planted(optim.Adam(0.1), lambda code: fast.sub(r" f\1 fast ", code))


@pytest.mark.parametrize(
    ("rule", "name"), [(Gamma(0.1), "gamma"), (Remainder(0.1), "frem")], ids=repr
)
def test_functions_that_devices_have_not_are_refused_by_name(rule, name):
    said = rf"{type(rule).__name__}\(lr=0\.1\) calls '\S*{name}\S*', which has no loop"
    with pytest.raises(TypeError, match=said):
        loop(rule).ptx()


def test_a_rule_that_does_not_compile_is_named():
    class Text(Gamma):
        @staticmethod
        def update(w, g, lr):
            return "w"

    with pytest.raises(TypeError, match=r"Text\(lr=0.1\) does not compile"):
        loop(Text(0.1)).ptx()


def test_functions_of_the_library_need_it(monkeypatch, tmp_path):
    one = loop(Exponential(0.1))
    if libdevice.read() is not None:
        assemble([one.ptx(kept())], tmp_path)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr(libdevice, "read", lambda: None)
    with pytest.raises(TypeError, match=r"Exponential.*install nvidia-nvvm"):
        one.ptx()
    # Here they are those of the processor.
    launcher = Launcher()
    kernel = kernel_of(Exponential(0.1), "f4", launcher)
    w, g = np.random.default_rng(0).normal(size=(2, 100)).astype("f4")
    made = w.copy()
    kernel.inplace(made, g, (), (0.1,))
    launcher.wait()
    optim.bind(Exponential(0.1), "f4", cache_dir=kept()).inplace(w, g, (), (0.1,))
    np.testing.assert_allclose(made, w, rtol=1e-5)


def test_an_old_numba_is_refused(monkeypatch):
    import numba

    monkeypatch.setattr(numba, "version_info", (0, 61, 2))
    with pytest.raises(TypeError, match=r"need numba >= 0\.62"):
        ptx.element_code(loop(optim.SGD(0.1)))


def test_code_is_kept_and_a_damaged_file_is_made_again(tmp_path, monkeypatch):
    one = loop(optim.SGD(0.25))
    text = one.ptx(str(tmp_path))
    [file] = tmp_path.glob("daskps_*.ptx")
    whole = file.read_bytes()

    def again():
        # Another name of the directory, for which nothing is in memory.
        names.append(names[-1] + "/.")
        return one.ptx(names[-1])

    names = [str(tmp_path)]
    with monkeypatch.context() as context:
        context.setattr(ptx, "element_code", lambda *_: pytest.fail("made again"))
        assert again() == text
    for damaged in (whole[:-9], b"", b"\xff" + whole, whole.replace(b"f32", b"f64", 1)):
        file.write_bytes(damaged)
        assert again() == text
        assert file.read_bytes() == whole


def test_without_a_directory_it_is_in_memory(tmp_path, caplog):
    one = loop(optim.SGD(0.25))
    (tmp_path / "file").touch()
    assert one.ptx(str(tmp_path / "file")) == one.ptx() == one.ptx(kept())
    assert "cannot keep compiled kernels" in caplog.text
    assert one.ptx() is one.ptx()
