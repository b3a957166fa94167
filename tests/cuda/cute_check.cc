// Compares kernels_cuda/isa/sm100_layout.h with CuTe (the headers of the nvidia-cutlass wheel) on the CPU: shared-memory descriptors,
// the address of every element of an operand, descriptor steps along K, instruction descriptors and scale offsets, over all shapes that
// the kernels may use. Prints what differs to stderr and exits with 1. (CuTe prints that it cannot cast a shared-memory pointer on a
// host and takes address 0; the address field is checked by itself.)
#include <cstdio>
#include <utility>

#include <cute/tensor.hpp>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <cutlass/numeric_types.h>

#include "isa/sm100_layout.h"
#include "quantize_math.h"

namespace {

using namespace moe::sm100;
using cute::Int;
using cute::UMMA::Major;

long compared = 0, different = 0;

void equal(const char* what, uint64_t ours, uint64_t theirs, int a = 0, int b = 0, int c = 0) {
  ++compared;
  if (ours != theirs && ++different <= 20) {
    std::fprintf(stderr, "%s (%d, %d, %d): ours %#llx, CuTe's %#llx\n", what, a, b, c, static_cast<unsigned long long>(ours),
                 static_cast<unsigned long long>(theirs));
  }
}

// Where element (mn, k) of an operand lies, as the loaders write it: panels of 64 rows of 128 bytes under the 128-byte swizzle.
uint32_t element_offset(bool mn_major, int bytes, int stage_k, int mn, int k) {
  const int per_row = 128 / bytes;
  const int row = mn_major ? mn / per_row * stage_k + k : mn;
  const int byte = (mn_major ? mn % per_row : k) * bytes;
  return row / 64 * moe::kPanelBytes + moe::panel_offset(row % 64, byte / 16) + byte % 16;
}

// An operand of kMn rows (of M or N) and one stage of K: 128 bytes of it when K-major, as many values when MN-major.
template <class T, Major kMajor, int kMn>
void check_operand() {
  constexpr int bytes = sizeof(T), stage_k = 128 / bytes, per_row = 128 / bytes;
  constexpr bool mn_major = kMajor == Major::MN;
  using Atom = std::conditional_t<mn_major, cute::UMMA::Layout_MN_SW128_Atom<T>, cute::UMMA::Layout_K_SW128_Atom<T>>;
  // K innermost among atoms: a panel's 128-byte rows along K follow each other, the next 128 bytes of M/N come after all of them.
  const auto layout = cute::tile_to_shape(Atom{}, cute::Shape<Int<kMn>, Int<stage_k>>{}, cute::Step<cute::_2, cute::_1>{});
  const auto swizzled = cute::as_position_independent_swizzle_layout(layout);  // swizzles element offsets, not pointer bits
  for (int mn = 0; mn < kMn; ++mn) {
    for (int k = 0; k < stage_k; ++k) {
      equal("element offset", element_offset(mn_major, bytes, stage_k, mn, k), swizzled(mn, k) * bytes, mn, k, mn_major);
    }
  }
  // The descriptor of one product of 32 bytes of K, and the steps to the next ones.
  constexpr int mma_k = 32 / bytes;
  T* nothing = nullptr;
  const auto one = cute::local_tile(cute::make_tensor(cute::make_smem_ptr(nothing), layout), cute::Shape<Int<kMn>, Int<mma_k>>{},
                                    cute::make_coord(cute::_0{}, cute::_0{}));
  const uint64_t theirs = static_cast<uint64_t>(cute::UMMA::make_umma_desc<kMajor>(one));
  const uint32_t mn_stride = 128 * stage_k;
  // Where M/N fits one 128-byte row, CuTe has no second chunk to give a leading offset for.
  const uint64_t read = mn_major && kMn <= per_row ? ~(uint64_t{0x3FFF} << 16) : ~uint64_t{0};
  equal("operand descriptor", operand_descriptor(0, mn_major, mn_stride) & read, theirs & read, kMn, bytes, mn_major);
  const auto plain = cute::get_nonswizzle_portion(layout);
  for (int i = 0; i < stage_k / mma_k; ++i) {
    equal("step along K", operand_k_step(mn_major, bytes) * i, plain(0, i * mma_k) * bytes / 16, kMn, bytes, i);
  }
}

template <class T, Major kMajor, int... kEighths>
void check_operands(std::integer_sequence<int, kEighths...>) {
  constexpr int step = kMajor == Major::MN ? 128 / sizeof(T) : 64;
  (check_operand<T, kMajor, (kEighths + 1) * step>(), ...);
}

template <int kBlocks, int kM, int kN, Major kA, Major kB, class A, class B>
void check_mx_instruction(Format a, Format b) {
  constexpr auto theirs = cute::UMMA::make_instr_desc_block_scaled<A, B, float, cutlass::float_ue8m0_t, kM, kN, kA, kB>();
  const uint32_t ours = mx_instruction(kM, kN, kA == Major::MN, kB == Major::MN, a, b);
  equal("mxf8f6f4 instruction", ours, static_cast<uint32_t>(theirs), kM, kN, a * 2 + b);
  for (uint32_t id_a = 0; id_a < 4; ++id_a) {
    for (uint32_t id_b = 0; id_b < 4; ++id_b) {
      const uint64_t high = cute::UMMA::make_runtime_instr_desc_block_scaled(theirs, id_a << 30, id_b << 30);
      equal("mxf8f6f4 instruction with scale ids", with_scale_ids(ours, id_a, id_b), high >> 32, kN, id_a, id_b);
      const InstructionFields fields = decode_instruction(with_scale_ids(ours, id_a, id_b));
      const bool same = fields.m == kM && fields.n == kN && fields.a_scale_id == static_cast<int>(id_a) && fields.ue8m0 &&
                        fields.b_scale_id == static_cast<int>(id_b) && fields.mn_major_a == (kA == Major::MN) &&
                        fields.mn_major_b == (kB == Major::MN) && fields.a_format == a && fields.b_format == b;
      equal("decoded instruction", same, 1, kM, kN);
    }
  }
}

template <int kBlocks, int kN, Major kA, Major kB>
void check_instructions_of_width() {
  constexpr int kM = 128 * kBlocks;
  using E4 = cutlass::float_e4m3_t;
  using E5 = cutlass::float_e5m2_t;
  if constexpr (mx_shape_supported(kBlocks, kM, kN)) {
    // CuTe's own static assertions must accept what we call supported.
    using Pair = std::conditional_t<kBlocks == 1, cute::SM100_MMA_MXF8F6F4_SS<E4, E4, float, cutlass::float_ue8m0_t, 128, kN, kA, kB>,
                                    cute::SM100_MMA_MXF8F6F4_2x1SM_SS<E4, E4, float, cutlass::float_ue8m0_t, 256, kN < 16 ? 16 : kN, kA, kB>>;
    static_assert(sizeof(Pair) > 0);
    check_mx_instruction<kBlocks, kM, kN, kA, kB, E4, E4>(kE4m3, kE4m3);
    check_mx_instruction<kBlocks, kM, kN, kA, kB, E4, E5>(kE4m3, kE5m2);
    check_mx_instruction<kBlocks, kM, kN, kA, kB, E5, E4>(kE5m2, kE4m3);
    check_mx_instruction<kBlocks, kM, kN, kA, kB, E5, E5>(kE5m2, kE5m2);
  }
  if constexpr (bf16_shape_supported(kBlocks, kM, kN)) {
    using bf16 = cutlass::bfloat16_t;
    constexpr auto theirs = cute::UMMA::make_instr_desc<bf16, bf16, float, kM, kN, kA, kB>();
    const uint32_t ours = bf16_instruction(kM, kN, kA == Major::MN, kB == Major::MN);
    equal("bf16 instruction", ours, static_cast<uint32_t>(theirs), kM, kN);
    const InstructionFields fields = decode_instruction(ours);
    equal("decoded bf16 instruction", fields.m == kM && fields.n == kN && fields.accumulator == 1 && fields.a_format == 1, 1, kM, kN);
  }
}

template <int kBlocks, Major kA, Major kB, int... kEighths>
void check_instructions(std::integer_sequence<int, kEighths...>) {
  (check_instructions_of_width<kBlocks, 8 * (kEighths + 1), kA, kB>(), ...);
}

template <int kBlocks>
void check_all_instructions() {
  constexpr auto widths = std::make_integer_sequence<int, 32>{};
  check_instructions<kBlocks, Major::K, Major::K>(widths);
  check_instructions<kBlocks, Major::K, Major::MN>(widths);
  check_instructions<kBlocks, Major::MN, Major::K>(widths);
  check_instructions<kBlocks, Major::MN, Major::MN>(widths);
}

void check_scales() {
  using Config = cutlass::detail::Sm1xxBlockScaledConfig<kMxBlock>;
  for (int rows = 128; rows <= 512; rows += 128) {
    for (int k = 128; k <= 1024; k += 128) {
      const auto a = Config::tile_atom_to_shape_SFA(cute::make_shape(rows, 8, k, 1));
      const auto b = Config::tile_atom_to_shape_SFB(cute::make_shape(8, rows, k, 1));
      for (int m = 0; m < rows; ++m) {
        for (int kb = 0; kb < k / 32; ++kb) {
          const int64_t ours = moe::mx::interleaved_offset(m, kb, k);
          equal("scale offset, A", ours, a(m, kb * 32, 0), m, kb, k);
          equal("scale offset, B", ours, b(m, kb * 32 + 31, 0), m, kb, k);
        }
      }
    }
  }
  // One atom as tcgen05.cp reads it: groups of 8 rows of 16 bytes.
  using Rows = cute::Layout<cute::Shape<cute::Shape<cute::_8, cute::_4>, cute::Shape<cute::_16, cute::_2>>,
                            cute::Stride<cute::Stride<cute::_16, cute::_128>, cute::Stride<cute::_1, cute::_512>>>;
  uint8_t* nothing = nullptr;
  const auto atom = cute::make_tensor(cute::make_smem_ptr(nothing), Rows{});
  const uint64_t no_leading = ~(uint64_t{0x3FFF} << 16);
  equal("scale descriptor", scale_descriptor(0) & no_leading, static_cast<uint64_t>(cute::UMMA::make_umma_desc<Major::K>(atom)) & no_leading);
}

void check_addresses() {
  for (uint32_t address = 0; address < 232448; address += 16) {
    cute::UMMA::SmemDescriptor theirs{operand_descriptor(0, true, 16384)};
    theirs.start_address_ = address >> 4;
    equal("address field", operand_descriptor(address, true, 16384), static_cast<uint64_t>(theirs), address);
    equal("decoded address", decode_matrix(theirs.desc_).address, address, address);
  }
}

}  // namespace

int main() {
  using E4 = cutlass::float_e4m3_t;
  using bf16 = cutlass::bfloat16_t;
  check_operands<E4, Major::K>(std::make_integer_sequence<int, 4>{});
  check_operands<E4, Major::MN>(std::make_integer_sequence<int, 2>{});
  check_operands<bf16, Major::K>(std::make_integer_sequence<int, 4>{});
  check_operands<bf16, Major::MN>(std::make_integer_sequence<int, 4>{});
  check_all_instructions<1>();
  check_all_instructions<2>();
  check_scales();
  check_addresses();
  std::fprintf(stderr, "%ld of %ld comparisons differ\n", different, compared);
  return different == 0 && compared > 100000 ? 0 : 1;
}
