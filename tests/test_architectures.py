"""Each architecture's words stay in its own files: the rest of csrc is compiled for all of them."""

import re

import pytest
from sources import CSRC, cpp_files

# The one file that asks which architecture it is compiled for.
SWITCH = CSRC / "base" / "arch.h"

# By architecture: its files, by a folder or a part of their names, and the headers, types, intrinsics, macros,
# instructions and names of it.
ARCHITECTURES = {
    "x86": (
        r"/x86/|avx|amx",
        r"\b(x86\w*|AMD64|SSE\d*|AVX\S*|\w*avx\w*|AMX|VNNI|VBMI|xmm\w*|immintrin\w*|cpuid|_mm\d*_\w+|__m\d{3}\w*|_pdep\w*|_pext\w*"
        r"|__builtin_ia32_\w+|__(SSE|AVX|AMX|BMI|FMA)\w*__|v\w+ps|tdp\w+|tile(load|store|zero|release)\w*)\b",
    ),
    "ARM": (
        r"/arm/|neon",
        r"\b(aarch64|arm64|NEON|SVE2?|Neoverse|Graviton|arm_neon\w*|HWCAP\w*|__ARM_\w+|__aarch64__"
        r"|v(ld|st)\d\w*_[usf]\d+|v[a-z]+q?_(n_|lane\w*_|low_|high_)?[usfb]f?\d+|(float|u?int|bfloat)\d+x\d+_t"
        r"|[bfsu]mmla|bfdot|[su]dot|fml[as]|fpcr)\b",
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_word_of_an_architecture_outside_its_files(architecture):
    own_files, words = ARCHITECTURES[architecture]
    found = [
        f"{path.relative_to(CSRC)}:{number}: {word[0]}"
        for path in cpp_files()
        if path != SWITCH and not re.search(own_files, f"/{path.relative_to(CSRC)}")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (word := re.search(words, line))
    ]
    assert found == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_words_are_found_where_they_belong(architecture):
    own_files, words = ARCHITECTURES[architecture]
    own = [path for path in cpp_files() if re.search(own_files, f"/{path.relative_to(CSRC)}")]
    assert len(own) >= 5
    assert [path.name for path in own if not re.search(words, path.read_text())] == []
