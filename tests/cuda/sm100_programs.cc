// Runs every Blackwell tile program on the host machine and compares with plain loops: bit for bit on integers, closely on random data,
// equal bits under every schedule. Usage: sm100_programs SCHEDULES [NAME]; prints a line per case, exits with 1 on any mismatch.
// SM100_PART (0 to 3) picks a quarter of the cases, so that they compile in parallel.
#include <chrono>
#include <cstdlib>

#include "sm100_chain.h"

namespace {

using namespace sm100_test;

#ifndef SM100_PART
#define SM100_PART 0
#endif

int cases = 0, failures = 0, schedules = 1;
std::string only;

// D and F differ, neither is a multiple of a tile, both have a tail of K; an expert of several tiles, an empty one, one of one row.
const Shape kRagged = {{150, 0, 1, 40}, 160, 224};
const Shape kRagged16 = {{150, 0, 1, 40}, 144, 208};
const Shape kWhole = {{256, 128}, 256, 128};
const Shape kEmpty = {{0, 0, 0}, 160, 224};

enum Option { kNothing, kAccumulate, kDependent, kEdges };

template <Kind kKind, class Config>
void check(const char* name, const Shape& shape, Option option = kNothing) {
  const bool accumulate = option == kAccumulate;
  const std::string full = std::string(name) + (Config::kMx ? " mxfp8" : " bf16") + ", " + std::to_string(Config::kBlocks) + " block(s), N " +
                           std::to_string(Config::kTileN) + (Config::kStealing ? ", stealing" : "") + (accumulate ? ", accumulate" : option == kDependent ? ", dependent tasks" : option == kEdges ? ", edge codes" : "") +
                           ", D " + std::to_string(shape.d) + (shape.count[0] == 0 ? ", no rows" : "");
  if (!only.empty() && full.find(only) == std::string::npos) return;
  const auto begin = std::chrono::steady_clock::now();
  ++cases;
  std::string wrong;
  Case<kKind, Config> integers(shape, Data::kIntegers, accumulate);
  integers.dependent = option == kDependent;
  wrong = integers.check_tasks();
  if (wrong.empty() && option == kEdges) {
    Case<kKind, Config> edges(shape, Data::kEdges);
    wrong = edges.template run<HostSm100>(1);
  }
  for (int seed = 0; seed < schedules && wrong.empty(); ++seed) wrong = integers.template run<HostSm100>(static_cast<uint32_t>(seed));
  if (wrong.empty()) {
    Case<kKind, Config> random(shape, Data::kRandom, accumulate);
    Results first, second;
    wrong = random.template run<HostSm100>(1, &first);
    if (wrong.empty()) wrong = random.template run<HostSm100>(2, &second);
    if (wrong.empty()) wrong = random.same("dw of two schedules", first.dw, second.dw);
    if (wrong.empty()) wrong = random.same("rows of two schedules", first.rows, second.rows);
    if (wrong.empty()) wrong = random.same("elements of two schedules", first.by_row.elements, second.by_row.elements);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s %s (%.2f s)%s%s\n", wrong.empty() ? "ok  " : "FAIL", full.c_str(), seconds, wrong.empty() ? "" : ": ", wrong.c_str());
  std::fflush(stdout);
  failures += !wrong.empty();
}

template <Kind kKind, class Config>
void check_chain(const char* name) {
  const std::string full = std::string(name) + (Config::kMx ? " mxfp8" : " bf16") + ", " + std::to_string(Config::kBlocks) +
                           " block(s), tasks that read what others wrote";
  if (!only.empty() && full.find(only) == std::string::npos) return;
  ++cases;
  Chain<kKind, Config> chain;
  std::string wrong;
  for (int seed = 0; seed < schedules && wrong.empty(); ++seed) wrong = chain.template run<HostSm100>(static_cast<uint32_t>(seed));
  std::printf("%s %s%s%s\n", wrong.empty() ? "ok  " : "FAIL", full.c_str(), wrong.empty() ? "" : ": ", wrong.c_str());
  failures += !wrong.empty();
}

template <int kBlocks, int kTileN, bool kStealing>
using Mx = Sm100Config<kBlocks, kTileN, true, kStealing>;
template <int kBlocks, int kTileN, bool kStealing>
using Bf16 = Sm100Config<kBlocks, kTileN, false, kStealing>;

void run_all() {
#if SM100_PART == 0
  check<kGateUp, Mx<1, 128, false>>("gate_up", kRagged);
  check<kGateUp, Mx<1, 256, false>>("gate_up", kRagged);
  check<kGateUp, Mx<1, 256, true>>("gate_up", kRagged);
  check<kGateUp, Mx<2, 256, false>>("gate_up", kRagged);
  check<kGateUp, Mx<2, 256, true>>("gate_up", kRagged);
  check<kGateUp, Mx<2, 256, true>>("gate_up", kWhole);
  check<kGateUp, Bf16<1, 128, false>>("gate_up", kRagged16);
  check<kGateUp, Bf16<1, 256, true>>("gate_up", kRagged16);
  check<kGateUp, Bf16<2, 128, false>>("gate_up", kRagged16);
  check<kGateUp, Bf16<2, 256, true>>("gate_up", kRagged16);
  check_chain<kGateUp, Mx<1, 128, false>>("gate_up");
  check_chain<kGateUp, Mx<2, 256, false>>("gate_up");
#elif SM100_PART == 1
  check<kDown, Mx<1, 64, false>>("down", kRagged);
  check<kDown, Mx<1, 128, false>>("down", kRagged);
  check<kDown, Mx<1, 192, false>>("down", kRagged);
  check<kDown, Mx<1, 192, true>>("down", {{130, 7}, 416, 96});
  check<kDown, Mx<1, 256, false>>("down", kRagged);
  check<kDown, Mx<2, 64, false>>("down", kRagged);
  check<kDown, Mx<2, 128, false>>("down", kRagged);
  check<kDown, Mx<2, 192, true>>("down", {{130, 7}, 416, 96});
  check<kDown, Mx<2, 256, true>>("down", kRagged);
  check<kDown, Mx<2, 256, true>>("down", kWhole);
  check<kDown, Bf16<1, 64, false>>("down", kRagged16);
  check<kDown, Mx<1, 128, false>>("down", kRagged, kDependent);
  check<kDown, Mx<2, 256, false>>("down", kRagged, kDependent);
  check<kDown, Bf16<1, 192, true>>("down", kRagged16);
  check<kDown, Bf16<2, 64, false>>("down", kRagged16);
  check<kDown, Bf16<2, 256, true>>("down", kRagged16);
  check_chain<kDown, Bf16<1, 64, false>>("down");
  check_chain<kDown, Bf16<2, 64, false>>("down");
#elif SM100_PART == 2
  check<kDgradDown, Mx<1, 128, false>>("dgrad_down", kRagged);
  check<kDgradDown, Mx<1, 256, true>>("dgrad_down", kRagged);
  check<kDgradDown, Mx<2, 256, false>>("dgrad_down", kRagged);
  check<kDgradDown, Mx<2, 256, true>>("dgrad_down", kWhole);
  check<kDgradDown, Bf16<1, 128, false>>("dgrad_down", kRagged16);
  check<kDgradDown, Bf16<2, 256, true>>("dgrad_down", kRagged16);
  check<kDgradGateUp, Mx<1, 128, false>>("dgrad_gate_up", kRagged);
  check<kDgradGateUp, Mx<1, 256, true>>("dgrad_gate_up", kRagged);
  check<kDgradGateUp, Mx<2, 256, true>>("dgrad_gate_up", kRagged);
  check<kDgradGateUp, Mx<2, 256, true>>("dgrad_gate_up", kEmpty);
  check<kDgradGateUp, Bf16<1, 64, false>>("dgrad_gate_up", kRagged16);
  check<kDgradGateUp, Bf16<2, 128, true>>("dgrad_gate_up", kRagged16);
#else
  check<kWgradDown, Mx<1, 128, false>>("wgrad_down", kRagged);
  check<kWgradDown, Mx<1, 256, true>>("wgrad_down", kRagged);
  check<kWgradDown, Mx<2, 256, false>>("wgrad_down", kRagged);
  check<kWgradDown, Mx<2, 256, true>>("wgrad_down", kRagged, kAccumulate);
  check<kWgradDown, Bf16<1, 128, false>>("wgrad_down", kRagged16);
  check<kWgradDown, Bf16<2, 256, true>>("wgrad_down", kRagged16);
  check<kWgradDown, Mx<1, 128, true>>("wgrad_down", {{100, 0, 130}, 96, 224}, kEdges);
  check<kWgradDown, Mx<2, 256, false>>("wgrad_down", {{100, 0, 130}, 96, 224}, kEdges);
  check<kWgradDown, Mx<1, 256, true>>("wgrad_down", kEmpty);
  check<kWgradGateUp, Mx<1, 128, true>>("wgrad_gate_up", kRagged);
  check<kWgradGateUp, Mx<2, 256, true>>("wgrad_gate_up", kRagged);
  check<kWgradGateUp, Bf16<1, 192, false>>("wgrad_gate_up", kRagged16, kAccumulate);
  check<kWgradGateUp, Bf16<2, 128, true>>("wgrad_gate_up", kRagged16);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  schedules = argc > 1 ? std::atoi(argv[1]) : 1;
  if (argc > 2) only = argv[2];
  run_all();
  std::printf("%d cases, %d failed\n", cases, failures);
  return failures == 0 && cases > 0 ? 0 : 1;
}
