"""race_reports.py on small logs and disassemblies: pairs that are known to be ordered are told from others of the same kernel."""

import pytest

from tests.cuda.race_reports import Code, column_reuse, dots_taken, pairs_of, weights_brought

KERNEL = (
    "void moe::<unnamed>::mx_grouped_gemm<moe::MxRoles<(moe::Kind)2, (bool)1, moe::Sm90Mx>>"
    "(moe::Batch<moe::MxArguments<CUtensorMap_st>, (int)1>)"
)
NAME = "_ZN3moe2_Nmx_grouped_gemmINS_7MxRolesILNS_4KindE2ELb1ENS_6Sm90MxEEEEEvNS_5BatchE"


def disassembly(name, lines):
    body = "\n".join(f"        /*{at:04x}*/    {text} ;  /* 0x0123456789abcdef */" for at, text in lines)
    return Code(f"\tcode for sm_90a\n\t\tFunction : {name}\n{body}\n")


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
    return disassembly(name, lines)


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


def weights_code(
    arrive="[R27+URZ+0x38320]", wait="[UR27+0x38320]", read="LDS R24, [R24+UR22+0x38600]", taken="[R16+URZ+0x38040]"
):
    lines = [
        (0x10, f"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, {wait}, R24"),
        (0x20, read),
        (0x30, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR27+0x38080], R32"),
        (0x40, "LDS R24, [R24+UR22+0x38600]"),
        (0x48, f"@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, {taken}, RZ"),
        (0x50, "STS [R25+0x38600], R30"),
        (0x60, f"@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, {arrive}, RZ"),
        (0x70, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ+0x38040], R9"),
    ]
    return disassembly(NAME, lines)


def test_weights_behind_their_barrier_are_known():
    ((first, second),) = pairs_of(log(read=0x20, write=0x50))
    assert weights_brought(first, second, weights_code())
    assert not column_reuse(first, second, weights_code())


@pytest.mark.parametrize(
    "read, lines",
    [
        (0x40, weights_code()),  # behind another barrier
        (0x20, weights_code(wait="[UR27+0x38328]")),
        (0x20, weights_code(arrive="[R27+URZ+0x38328]")),
        (0x20, weights_code(taken="[R16+URZ+0x38048]")),  # the next tile's may come too early
        (0x20, weights_code(read="LDS R24, [R24+UR22+0x38680]")),  # another table
        (0x20, weights_code(read="LDS.128 R24, [R24+UR22+0x38600]")),
    ],
)
def test_other_reads_of_weights_are_not(read, lines):
    ((first, second),) = pairs_of(log(read=read, write=0x50))
    assert not weights_brought(first, second, lines)


DOTS_KERNEL = "void moe::<unnamed>::grouped_gemm<moe::TokensN<(moe::Kind)2, (bool)1, moe::Sm90>>(moe::Batch<>)"
DOTS_NAME = "_ZN3moe2_Ngrouped_gemmINS_7TokensNILNS_4KindE2ELb1ENS_4Sm90EEEEEvNS_5BatchE"


WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0,"
ARRIVE = "@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ,"


def dots_code(
    before=f"{WAIT} [UR11+0x38000], R7",
    written=f"{ARRIVE} [UR4+0x38040], RZ",
    wait=f"{WAIT} [R3+URZ+0x38040], R2",
    after="SYNCS.ARRIVE.TRANS64.RED.ART0",
):
    lines = [
        (0x10, before),
        (0x20, "STS [R27+0xc000], R20"),
        (0x28, written),
        (0x30, wait),
        (0x40, "LDS.128 R16, [R2]"),
        (0x50, f"@!P0 {after} RZ, [R3+URZ], R16"),
        (0x60, "@!P0 SYNCS.ARRIVE.TRANS64.RED.ART0 RZ, [R2+URZ], R16"),
        (0x70, "LDS.128 R16, [R2]"),
    ]
    return disassembly(DOTS_NAME, lines)


def test_dots_of_a_stage_that_is_given_back_are_known():
    ((first, second),) = pairs_of(log(read=0x40, write=0x20, kernel=DOTS_KERNEL))
    assert dots_taken(first, second, dots_code())


@pytest.mark.parametrize(
    "read, kernel, lines",
    [
        (0x70, DOTS_KERNEL, dots_code()),  # after the stage went back
        (0x40, DOTS_KERNEL.replace("Kind)2", "Kind)3"), dots_code()),
        (0x40, DOTS_KERNEL, dots_code(before="SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+URZ], RZ")),  # no stage waited for
        (0x40, DOTS_KERNEL, dots_code(after="SYNCS.ARRIVE.TRANS64.A1T0")),  # given to itself
        (0x40, DOTS_KERNEL, dots_code(written=f"{WAIT} [R4+URZ+0x38020], R3")),  # a table of the gathering warp
        (0x40, DOTS_KERNEL, dots_code(wait=f"{ARRIVE} [R3+URZ+0x38040], RZ")),  # nothing waited for
    ],
)
def test_other_reads_of_dots_are_not(read, kernel, lines):
    ((first, second),) = pairs_of(log(read=read, write=0x20, kernel=kernel))
    assert not dots_taken(first, second, lines)


def test_log_that_says_more_than_was_understood_is_an_error():
    with pytest.raises(ValueError, match="not understood"):
        pairs_of(log(hazards=2))
    with pytest.raises(ValueError, match="not understood"):
        pairs_of("========= COMPUTE-SANITIZER\n")
