// What kernels_cuda's layers need of CUDA's driver header, on the host emulator: its tensor maps.
#pragma once

#include "isa/host/engine.h"

using CUtensorMap = moe::host::Map;
