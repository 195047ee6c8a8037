"""The levels of the kernels against each other by a program of their own, here and under emulation."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "native"
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
COMPILER = shutil.which("c++")
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")
IS_X86 = platform.machine() in ("x86_64", "AMD64")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(None in (CMAKE, COMPILER), reason="needs cmake and a C++ compiler"),
]


def build(folder: Path, *options: str) -> str:
    for command in ([CMAKE, "-S", SOURCE, "-B", folder, *options], [CMAKE, "--build", folder]):
        found = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "warning:" not in found.stdout + found.stderr
    return str(folder / "levels")


def run(*command: str) -> tuple[set[str], list[str]]:
    """Which levels ran, and the lines that tell of a difference."""
    found = subprocess.run(command, capture_output=True, text=True)
    lines = found.stdout.splitlines()
    wrong = [line for line in lines if not line.endswith(" ok")]
    assert found.returncode == (1 if wrong else 0), found.stdout + found.stderr
    return {line[27:40].strip() for line in lines}, wrong


def test_levels_of_this_machine_agree(tmp_path: Path) -> None:
    """On x86 those of AVX-512 too, where SIMDe is installed: the source of the level over its functions."""
    has_simde = (
        IS_X86
        and subprocess.run(
            [str(COMPILER), "-E", "-x", "c++", "-"],
            input="#include <simde/x86/avx512.h>\n",
            capture_output=True,
            text=True,
        ).returncode
        == 0
    )
    program = build(tmp_path, f"-DMOESAIC_EMULATED={'ON' if has_simde else 'OFF'}")
    levels, wrong = run(program)
    assert not wrong, "\n".join(wrong)
    assert "portable" in levels
    if has_simde:
        assert {"avx2", "avx512", "avx512-vnni", "avx512-bf16"} <= levels
    _, spoilt = run(program, "--spoil")
    assert len(levels) == 1 or len(spoilt) >= 13, "a spoilt result of each kernel must be seen"


@pytest.mark.skipif(CROSS_COMPILER is None, reason="needs aarch64-linux-gnu-g++ (g++-aarch64-linux-gnu)")
@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64 (qemu-user)")
def test_levels_of_aarch64_agree(tmp_path: Path) -> None:
    program = build(
        tmp_path,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
    for processor, expected in {
        "max": {"portable", "neon", "neon-dotprod"},
        "cortex-a53": {"portable", "neon"},  # has no dot products
    }.items():
        levels, wrong = run(str(EMULATOR), "-cpu", processor, program)
        assert not wrong, "\n".join(wrong)
        assert levels == expected
