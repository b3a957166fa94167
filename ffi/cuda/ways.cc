#include "cuda/ways.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace nb = nanobind;

namespace moejax::xla_ffi {
namespace {

std::mutex mutex;
std::vector<moe::LayerShape> entries;

double RowsPerExpert(const moe::LayerShape& s, int64_t experts) {
  return static_cast<double>(s.tokens) * static_cast<double>(s.top_k) / static_cast<double>(std::max<int64_t>(experts, 1));
}

// One entry from Python: tokens, top_k, experts, d_model, width, and a way by product.
using Entry = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, std::vector<int>>;

void SetWays(const std::vector<Entry>& given) {
  std::vector<moe::LayerShape> shapes;
  for (const auto& [tokens, top_k, experts, d_model, width, ways] : given) {
    moe::LayerShape shape;
    shape.tokens = tokens;
    shape.top_k = top_k;
    shape.experts = experts;
    shape.d_model = d_model;
    shape.width = width;
    if (ways.size() != moe::kNumProducts) {
      throw std::invalid_argument("set_ways got " + std::to_string(ways.size()) + " ways of an entry; there are " +
                                  std::to_string(moe::kNumProducts) + " products");
    }
    for (int product = 0; product < moe::kNumProducts; ++product) {
      const bool known = ways[product] >= 0 && ways[product] < moe::kNumWays;
      const moe::Way way = known ? static_cast<moe::Way>(ways[product]) : moe::kNumWays;
      if (!known || !moe::has_way(shape, product, way)) {
        throw std::invalid_argument("set_ways got way " + std::to_string(ways[product]) + " of product " + std::to_string(product) +
                                    ", which that shape does not have");
      }
      shape.way[product] = way;
    }
    shapes.push_back(shape);
  }
  const std::lock_guard lock(mutex);
  entries = std::move(shapes);
}

// The ways that a product of a shape has, without kWayAuto.
std::vector<int> WaysOf(int product, int64_t tokens, int64_t top_k, int64_t experts, int64_t d_model, int64_t width) {
  moe::LayerShape shape;
  shape.tokens = tokens;
  shape.top_k = top_k;
  shape.experts = experts;
  shape.d_model = d_model;
  shape.width = width;
  std::vector<int> ways;
  for (int way = moe::kWayAuto + 1; way < moe::kNumWays; ++way) {
    if (moe::has_way(shape, product, static_cast<moe::Way>(way))) ways.push_back(way);
  }
  return ways;
}

}  // namespace

void ChooseWays(moe::LayerShape& shape) {
  const std::lock_guard lock(mutex);
  double nearest = std::log(1.5);
  const int64_t experts = moe::routed_experts(shape);
  for (const moe::LayerShape& entry : entries) {
    if (entry.experts != experts || entry.d_model != shape.d_model || entry.width != shape.width) continue;
    const double distance = std::abs(std::log(RowsPerExpert(entry, entry.experts)) - std::log(RowsPerExpert(shape, experts)));
    if (!(distance <= nearest)) continue;
    nearest = distance;
    for (int product = 0; product < moe::kNumProducts; ++product) {
      const bool has = moe::has_way(shape, product, entry.way[product]);  // an entry of another top_k or number of tokens may not
      shape.way[product] = has ? entry.way[product] : moe::kWayAuto;
    }
  }
}

void BindWays(nb::module_& module) {
  module.def("set_ways", &SetWays, nb::arg("entries"),
             "Sets how products run, by shape: a list of (tokens, top_k, experts, d_model, width, way of each product).");
  module.def("ways_of", &WaysOf, nb::arg("product"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("d_model"),
             nb::arg("width"), "The ways that a product of a shape can run.");
}

}  // namespace moejax::xla_ffi
