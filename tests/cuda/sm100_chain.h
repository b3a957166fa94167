// Tasks that read what others of the same launch have written: link i + 1 of a chain multiplies the rows that link i computed, and waits for
// them by its counter. The result of a product lies where the next one's operand does: BF16 rows by bulk stores, or MXFP8 rows and codes by
// ordinary stores. Expected: the same links, one launch each, whose products the cases of sm100_case.h compare with plain loops.
#pragma once

#include "sm100_case.h"

namespace sm100_test {

template <Kind kKind, class Config>
struct Chain {
  static_assert(kKind == kGateUp || (kKind == kDown && !Config::kMx), "the result must have the form of the operand");
  static constexpr bool kMx = Config::kMx;
  static constexpr int kLinks = 3, kWidth = kMx ? 160 : 144, kStep = Config::kClusterM, kRows = (kLinks + 1) * kStep;

  Operand first, weights;
  std::vector<Task> tasks;
  std::vector<int> targets, signals;
  Operand expected;

  Chain() {
    std::mt19937 random(5);
    auto later = [](int row, int) { return row >= kStep; };  // NaN until it is written
    auto none = [](int, int) { return false; };
    first = make_operand(kLeft, kMx, false, kRows, kWidth, 1, 1, Data::kIntegers, random, later, true);
    weights = make_operand(kRight, kMx, false, kWidth, kWidth, kKind == kGateUp ? 2 : 1, kLinks, Data::kIntegers, random, none);
    std::vector<int> count(kLinks, kStep), start;
    for (int link = 0; link < kLinks; ++link) start.push_back(link * kStep);
    const Tiling tiling = {kKind, Config::kClusterM, step_n<Config>(kKind), kWidth, kWidth, false, Pairs::kNone};
    tasks = list_tasks(tiling, count, start);
    targets.assign(kLinks, static_cast<int>(tasks.size()) / kLinks * 4 * Config::kBlocks);
    expected = first;
    for (int link = 0; link < kLinks; ++link) {
      std::vector<Task> alone;
      for (const Task& task : tasks) {
        if (task.expert == link) alone.push_back(task);
      }
      wrong = launch<HostSm100>(alone, expected, 0);
      if (!wrong.empty()) return;
    }
    for (Task& task : tasks) {
      task.signal = task.expert;
      task.wait = task.expert - 1;
    }
  }

  // Runs the chain in one launch. Returns "" or what is wrong.
  template <class Isa>
  std::string run(uint32_t seed) {
    if (!wrong.empty()) return "one launch per link: " + wrong;
    Operand rows = first;
    const std::string stopped = launch<Isa>(tasks, rows, seed);
    if (!stopped.empty()) return "machine: " + stopped;
    if (signals != targets) return "a link signalled another number of times";
    if (rows.elements == first.elements) return "nothing was computed";
    using Any = Case<kKind, Config>;
    const std::string differs = Any::same("rows of the chain", rows.elements, expected.elements);
    return differs.empty() ? Any::same("codes of the chain", rows.codes, expected.codes) : differs;
  }

 private:
  std::string wrong;

  template <class Isa>
  std::string launch(const std::vector<Task>& list, Operand& rows, uint32_t seed) {
    signals.assign(kLinks, 0);
    Sm100Batch<Map> batch = {};
    Sm100Arguments<Map>& args = batch.args;
    args.a = operand_map(rows, 64);
    args.b = operand_map(weights, Config::kBoxRowsB);
    args.scale_a = scale_map(rows);
    args.scale_b = scale_map(weights);
    uint8_t* const next = rows.elements.data() + static_cast<size_t>(kStep) * kWidth * Config::kElementBytes;
    if (kMx) {
      args.by_row = {next, rows.codes.data() + mx::interleaved_offset(kStep, 0, kWidth)};
    } else {
      args.out = map_of(next, 2, kWidth, kRows - kStep, 1, 1, 32);
    }
    args.counters = args.signals = signals.data();
    args.targets = targets.data();
    args.num_rows = kRows;
    args.n_extent = args.k_extent = kWidth;
    const int count = static_cast<int>(list.size());
    batch.tasks = list.data();
    batch.num_tasks = &count;
    machine::Launch launch;
    launch.blocks = Config::kBlocks;
    launch.threads = Config::kThreads;
    launch.shared_bytes = Config::kSharedBytes;
    launch.seed = seed;
    return machine::run(launch, [&] { sm100_run_block<kKind, true, Isa, Config>(batch); });
  }
};

}  // namespace sm100_test
