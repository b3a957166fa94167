"""race_reports.py on a small log and disassembly: the pair that is known to be ordered is told from others of the same kernel."""

import pytest

from tests.cuda.race_reports import Code, column_reuse, pairs_of

KERNEL = (
    "void moe::<unnamed>::mx_grouped_gemm<moe::MxRoles<(moe::Kind)2, (bool)1, moe::Sm90Mx>>"
    "(moe::Batch<moe::MxArguments<CUtensorMap_st>, (int)1>)"
)
NAME = "_ZN3moe2_Nmx_grouped_gemmINS_7MxRolesILNS_4KindE2ELb1ENS_6Sm90MxEEEEEvNS_5BatchE"


def code(arrive="[UR32+0x38108]", wait="[UR32+0x38108]", read="LDSM.16.MT88.4 R4, [R46]", name=NAME):
    lines = [
        (0x10, "LDSM.16.M88.4 R8, [R46]"),
        (0x20, read),
        (0x30, f"@!P4 SYNCS.ARRIVE.TRANS64.A1T0 RZ, {arrive}, RZ"),
        (0x40, f"SYNCS.PHASECHK.TRANS64.TRYWAIT P1, {wait}, R4"),
        (0x50, "STS.64 [R4], R6"),
        (0x60, "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR32+0x38000], R4"),
        (0x70, "STS.64 [R5], R6"),
    ]
    body = "\n".join(f"        /*{at:04x}*/    {text} ;  /* 0x0123456789abcdef */" for at, text in lines)
    return Code(f"\tcode for sm_90a\n\t\tFunction : {name}\n{body}\n")


def log(read=0x20, write=0x50, kernel=KERNEL, hazards=1):
    return (
        f"========= Error: Race reported between Read access at {kernel}+{read:#x}\n"
        f"=========     and Write access at {kernel}+{write:#x} [4320 hazards]\n========= \n"
        f"========= RACECHECK SUMMARY: {hazards} hazards displayed (1 errors, 0 warnings)\n"
    )


def test_columns_behind_their_barrier_are_known():
    ((first, second),) = pairs_of(log())
    assert (first.kind, first.offset, second.kind, second.offset) == ("Read", 0x20, "Write", 0x50)
    assert column_reuse(first, second, code()) and column_reuse(second, first, code())


@pytest.mark.parametrize(
    "report, lines",
    [
        (log(read=0x10), code()),  # another read
        (log(write=0x40), code()),  # not a write
        (log(write=0x70), code()),  # behind another barrier
        (log(kernel=KERNEL.replace("Kind)2", "Kind)0")), code()),
        (log(kernel=KERNEL.replace("(bool)1", "(bool)0")), code()),  # not in the library
        (log(), code(wait="[UR32+0x38100]")),  # waits for something else
        (log(), code(read="LDS.128 R4, [R46]")),
    ],
)
def test_other_pairs_are_not(report, lines):
    ((first, second),) = pairs_of(report)
    assert not column_reuse(first, second, lines)


def test_log_that_says_more_than_was_understood_is_an_error():
    with pytest.raises(ValueError, match="not understood"):
        pairs_of(log(hazards=2))
    with pytest.raises(ValueError, match="not understood"):
        pairs_of("========= COMPUTE-SANITIZER\n")
