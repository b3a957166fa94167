"""race_reports.py on small logs and disassemblies: pairs that are known to be ordered are told from others of the same kernel."""

import pytest

from tests.cuda.race_reports import (
    Code,
    codes_exchanged,
    codes_taken,
    column_reuse,
    dots_taken,
    pairs_of,
    weights_brought,
)

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


def loop_code(wait="[UR32+0x38108]", end="@P3 BRA 0x18", more="NOP"):
    lines = [
        (0x18, "NOP"),
        (0x20, "LDSM.16.MT88.4 R4, [R46]"),
        (0x30, f"SYNCS.PHASECHK.TRANS64.TRYWAIT P1, {wait}, R4"),
        (0x40, more),
        (0x50, "STS.64 [R4], R6"),
        (0x60, "@P3 BRA 0x80"),
        (0x70, "@!P4 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR32+0x38108], RZ"),
        (0x80, end),
        (0x90, "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR32+0x38000], R4"),
        (0xA0, "@P3 BRA 0x10"),
    ]
    return disassembly(NAME, lines)


def test_columns_read_a_turn_ahead_are_known():
    ((first, second),) = pairs_of(log())
    assert column_reuse(first, second, loop_code())


@pytest.mark.parametrize(
    "lines",
    [
        loop_code(wait="[UR32+0x38100]"),  # for something else
        loop_code(end="@P3 BRA 0x28"),  # the read is before the loop
        loop_code(end="SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR32+0x38100], RZ"),  # the loop has another barrier
        loop_code(more="SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR32+0x38000], R4"),
        loop_code(more="@!P4 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR32+0x38100], RZ"),
    ],
)
def test_other_loops_are_not(lines):
    ((first, second),) = pairs_of(log())
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


CODES_SYNC = "NOP"
CODES_BACK = "@!P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R14+URZ], RZ"


def codes_code(
    seen=f"{WAIT} [UR12+0x38000], R3",
    read="LDS.U8 R13, [R21+UR14]",
    between="ULOP3.LUT UR14, UR32, 0x10006, URZ, 0xfc, !UPT",
    use="IMAD.IADD R220, R12.reuse, 0x1, R13",
    following=f"{WAIT} [UR12+0x38000], R221",
    empty="0x38020",
    moved="@!P0 PRMT R14, R19, 0x654, R14",
    sync=CODES_SYNC,
    back=CODES_BACK,
    wait=f"{WAIT} [R11+URZ+0x38020], R8",
    counted="SYNCS.ARRIVE.TRANS64 RZ, [R11+URZ+0x38000], R22",
    panel="UTMALDG.4D [UR16], [UR14]",
    add="VIADD",
    kind=0,
):
    lines = [
        (0x10, seen),
        (0x20, read),
        (0x28, between),
        (0x30, use),
        (0x38, following),
        (0x40, f"@!P0 {add} R14, R13, {empty}"),
        (0x48, moved),
        (0x50, sync),
        (0x58, back),
        (0x60, "IMAD.IADD R220, R12, 0x1, R13"),
        (0x68, "NOP"),
        (0x70, wait),
        (0x80, counted),
        (0x90, panel),
        (0xA0, "UBLKCP.S.G [UR8], [UR10], UR5"),
        (0xB0, "LDS.U8 R13, [R21+UR14]"),
    ]
    return disassembly(NAME.replace("KindE2", f"KindE{kind}"), lines)


def codes_log(kind=0, read=0x20, write=0xA0):
    return log(read=read, write=write, kernel=KERNEL.replace("Kind)2", f"Kind){kind}"))


@pytest.mark.parametrize("kind", [0, 2])
def test_codes_of_a_stage_that_is_given_back_are_known(kind):
    ((first, second),) = pairs_of(codes_log(kind))
    assert codes_taken(first, second, codes_code(kind=kind)) and codes_taken(second, first, codes_code(kind=kind))
    assert codes_taken(first, second, codes_code(kind=kind, sync="WARPSYNC R2"))
    assert codes_taken(first, second, codes_code(kind=kind, add="IADD3", empty="0x38020, RZ"))
    assert not any(known(first, second, codes_code(kind=kind)) for known in (column_reuse, weights_brought, dots_taken))


@pytest.mark.parametrize(
    "report, lines",
    [
        (codes_log(kind=4), codes_code(kind=4)),  # another kernel
        (codes_log(kind=2), codes_code(kind=0)),
        (codes_log(read=0xB0), codes_code()),  # the last thing that is done
        (codes_log(write=0x90), codes_code()),  # operands
        (codes_log(), codes_code(panel="UBLKCP.S.G [UR16], [UR10], UR5")),  # brings something else as well
        (codes_log(), codes_code(read="LDS R13, [R21+UR14]")),
        (codes_log(), codes_code(seen=f"{WAIT} [UR12+0x38080], R3")),  # not of a full stage
        (codes_log(), codes_code(seen="SYNCS.EXCH.64 URZ, [UR5+0x38000], UR6")),
        # The read may be under way when the stage goes back.
        (codes_log(), codes_code(use="MOV R13, R12")),
        (codes_log(), codes_code(use="@P1 IMAD.IADD R220, R12, 0x1, R13")),
        (codes_log(), codes_code(between="@P3 BRA 0x38")),
        (codes_log(), codes_code(use="MOV R15, R12")),
        # Other lanes of the warp may not have read.
        (codes_log(), codes_code(sync="UMOV UR15, 0x40000040")),
        (codes_log(), codes_code(between="NOP", sync="UMOV UR15, 0x40000040")),
        (codes_log(), codes_code(sync=CODES_BACK, back=CODES_SYNC)),
        # Something else goes back, or to this block alone.
        (codes_log(), codes_code(empty="0x38028")),
        (codes_log(), codes_code(moved="@!P0 PRMT R14, R19, 0x654, R13")),
        (codes_log(), codes_code(moved="@!P0 VIADD R14, R14, 0x8")),
        (codes_log(), codes_code(back="@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R14+URZ], RZ")),
        (codes_log(), codes_code(back="@!P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R15+URZ], RZ")),
        (codes_log(), codes_code(following=f"{WAIT} [UR12+0x38080], R221")),
        (codes_log(), codes_code(following=f"{ARRIVE} [R2+URZ+0x38040], RZ")),
        # The loader waits for something else, for nothing, or again later.
        (codes_log(), codes_code(wait=f"{WAIT} [R11+URZ+0x38028], R8")),
        (codes_log(), codes_code(wait="SYNCS.ARRIVE.TRANS64 RZ, [R11+URZ+0x38020], R8")),
        (codes_log(), codes_code(counted=f"{WAIT} [R11+URZ+0x38000], R8")),
        (codes_log(), codes_code(counted="SYNCS.ARRIVE.TRANS64 RZ, [R11+URZ+0x38080], R22")),
        (codes_log(), codes_code(panel="SYNCS.ARRIVE.TRANS64 RZ, [R11+URZ+0x38040], R22")),
    ],
)
def test_other_reads_of_codes_are_not(report, lines):
    ((first, second),) = pairs_of(report)
    assert not codes_taken(first, second, lines)


def exchange_code(
    barrier="IADD3 R41, R39, 0x32b80, RZ",
    moved="PRMT R41, R4, 0x654, R41",
    more="SHFL.BFLY PT, R9, R8, 0x2, 0x1f",
    write="@!P2 ST.E [R16], R9",
    sync="NOP",
    fence="@!P2 MEMBAR.ALL.GPU",
    arrive="@!P2 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R41+URZ], RZ",
    wait=f"{WAIT} [R39+URZ+0x32b80], R8",
    read="LDS R16, [R16]",
):
    lines = [
        barrier,
        moved,
        more,
        write,
        sync,
        fence,
        arrive,
        wait,
        read,
        f"{WAIT} [R39+URZ+0x32b90], R8",
        "LDS R16, [R16]",
    ]
    name = NAME.replace("7MxRoles", "9MxTokensN").replace("KindE2", "KindE0")
    return disassembly(name, [(16 * i + 16, line) for i, line in enumerate(lines)])


def exchange_log(read=0x90, write=0x40, kind=0):
    return log(read, write, KERNEL.replace("MxRoles", "MxTokensN").replace("Kind)2", f"Kind){kind}"))


def test_codes_behind_the_arrival_of_the_other_block_are_known():
    ((first, second),) = pairs_of(exchange_log())
    assert codes_exchanged(first, second, exchange_code()) and codes_exchanged(second, first, exchange_code())
    assert codes_exchanged(first, second, exchange_code(barrier="VIADD R41, R39, 0x32b80", sync="WARPSYNC R2"))
    assert not codes_taken(first, second, exchange_code())


@pytest.mark.parametrize(
    "report, lines",
    [
        (exchange_log(kind=1), exchange_code()),  # another kernel
        (exchange_log(read=0xB0), exchange_code()),  # behind another barrier
        (exchange_log(write=0x30), exchange_code()),  # not that write
        (exchange_log(), exchange_code(more="@P1 ST.E [R20], R9")),  # there is another one to a mapped address
        (exchange_log(), exchange_code(read="LDS.128 R16, [R16]")),
        # Other lanes of the warp may not have written, or the other block may not see it.
        (exchange_log(), exchange_code(sync="UMOV UR4, 0xffffffff")),
        (exchange_log(), exchange_code(fence="@!P2 MEMBAR.ALL.CTA")),
        (exchange_log(), exchange_code(sync="@!P2 MEMBAR.ALL.GPU", fence="NOP")),
        # Nobody arrives, in this block alone, or on something else; nothing is waited for, or something else.
        (exchange_log(), exchange_code(arrive="NOP")),
        (exchange_log(), exchange_code(arrive="@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R41+URZ], RZ")),
        (exchange_log(), exchange_code(arrive="@!P2 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R40+URZ], RZ")),
        (exchange_log(), exchange_code(barrier="IADD3 R41, R39, 0x32b88, RZ")),
        (exchange_log(), exchange_code(moved="PRMT R40, R4, 0x654, R41")),
        (exchange_log(), exchange_code(wait=f"{WAIT} [R39+URZ+0x32b88], R8")),
        (exchange_log(), exchange_code(wait="NOP")),
    ],
)
def test_other_reads_of_exchanged_codes_are_not(report, lines):
    ((first, second),) = pairs_of(report)
    assert not codes_exchanged(first, second, lines)


def test_log_that_says_more_than_was_understood_is_an_error():
    with pytest.raises(ValueError, match="not understood"):
        pairs_of(log(hazards=2))
    with pytest.raises(ValueError, match="not understood"):
        pairs_of("========= COMPUTE-SANITIZER\n")
