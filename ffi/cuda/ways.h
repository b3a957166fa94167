// Which way each grouped product runs (kernels_cuda/moe.h: Way), by shape: measured by moejax/tune.py, set once from Python, read by
// every call. The choice changes speed, never bits, so it is no attribute of the program: a program compiled on one host runs on
// another with that host's choice.
#pragma once

#include <nanobind/nanobind.h>

#include "moe.h"

namespace moejax::xla_ffi {

// Fills shape.way from the entry of the same routed experts, D and F whose rows per expert are nearest, if any is within a factor of 1.5.
void ChooseWays(moe::LayerShape& shape);

// Python's side: set_ways, ways_of.
void BindWays(nanobind::module_& module);

}  // namespace moejax::xla_ffi
