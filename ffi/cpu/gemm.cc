#include "cpu/gemm.h"

#include <cblas.h>

namespace moejax::cpu {
namespace {

void Gemm(CBLAS_TRANSPOSE transpose_a, CBLAS_TRANSPOSE transpose_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
          const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  if (m == 0 || n == 0) return;
  scipy_cblas_sgemm(CblasRowMajor, transpose_a, transpose_b, static_cast<blasint>(m), static_cast<blasint>(n), static_cast<blasint>(k),
                    1.0f, a, static_cast<blasint>(lda), b, static_cast<blasint>(ldb), add ? 1.0f : 0.0f, c,
                    static_cast<blasint>(ldc));
}

}  // namespace

void GemmNT(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Gemm(CblasNoTrans, CblasTrans, m, n, k, a, lda, b, ldb, c, ldc, add);
}
void GemmNN(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Gemm(CblasNoTrans, CblasNoTrans, m, n, k, a, lda, b, ldb, c, ldc, add);
}
void GemmTN(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Gemm(CblasTrans, CblasNoTrans, m, n, k, a, lda, b, ldb, c, ldc, add);
}

void InitGemm() { scipy_openblas_set_num_threads(1); }

std::string GemmDescription() {
  return std::string(scipy_openblas_get_config()) + ", kernels for " + scipy_openblas_get_corename();
}

}  // namespace moejax::cpu
