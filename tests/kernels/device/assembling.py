"""The look at PTX that all loops are given: rounding said everywhere, and NVIDIA's assembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

#: Arithmetic that an assembler may fuse, as it does not say how it rounds; other bits; and
#: functions that somebody else has.
_WRONG = re.compile(
    r"\b(?:add|sub|mul|div|sqrt|rcp|mad)\.f\d+|\bfma\.|\.approx|\.full|\.ftz|\.extern|"
    r"\bcall|\b(?:min|max)\.f\d+|\bcvt\.(?!r[nz]i?\.|u|s|f32\.f16|f64\.f(?:16|32)|f16\.f16)[^;]*"
)


def faults(ptx: str) -> list[str]:
    """Return what in a text would have other bits than hosts, or would not assemble."""
    return _WRONG.findall(ptx)


def assemble(texts: list[str], folder: Path) -> None:
    """Give kernels to NVIDIA's assembler, all at once, where there is one."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return
    joined = ""
    for i, text in enumerate(texts):
        [name] = re.findall(r"\.visible \.entry (\w+)\(", text)
        body = text[text.index(".visible") :] if i else text
        joined += re.sub(rf"\b{name}", f"kernel{i}", body).replace("$L_", f"$L{i}_")
    source = folder / "kernels.ptx"
    source.write_text(joined)
    command = [
        ptxas,
        "-arch=sm_90",
        "-v",
        str(source),
        "-o",
        str(folder / "kernels.cubin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert len(spilled) >= len(texts)
    assert set(spilled) == {"0"}
