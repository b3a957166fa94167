// FP32 matrix products of one thread, from OpenBLAS. Row-major; C = A B + beta C with beta 0 or 1.
//
// OpenBLAS chooses its kernels for the processor it runs on. It is told to use one thread, and each call computes a tile that is a
// function of the shapes alone, so results do not depend on how many of our threads call it (`docs/native.md`).
#pragma once

#include <cstdint>
#include <string>

namespace moejax::cpu {

// Largest size or stride a product may have (BLAS counts in 32 bits). Offsets between tiles are ours, and 64-bit.
inline constexpr int64_t kMaxGemmSize = 0x7FFFFFFF;

// C[m x n] = A[m x k] B[n x k]^T
void GemmNT(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add);
// C[m x n] = A[m x k] B[k x n]
void GemmNN(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add);
// C[m x n] = A[k x m]^T B[k x n]
void GemmTN(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add);

// Must run once before the first product: makes OpenBLAS single-threaded.
void InitGemm();
std::string GemmDescription();

}  // namespace moejax::cpu
