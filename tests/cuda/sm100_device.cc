// The Blackwell kernels on a Blackwell GPU: the cases and the oracle of sm100_case.h, with real tensor maps and launches. Nobody has run
// this yet: no such GPU was at hand. scripts/blackwell_first_run.sh builds and runs it.
//
//   sm100_device test          every compiled program, small and larger shapes, integers bit for bit and random data, twice each on dirty
//                              buffers, equal bits; exits with 1 if any differs
//   sm100_device small         the small shapes alone (for compute-sanitizer)
//   sm100_device bench         TFLOP/s of every program on one layer
// Prints one JSON object per line.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

#include "quantize.h"
#include "sm100_case.h"
#include "sm100_launch.h"
#include "task_list.h"
#include "tensor_map.h"

namespace {

using namespace sm100_test;

int failures = 0;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(error));
  std::exit(2);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::printf("{\"error\": \"%s\"}\n", status.message.c_str());
  std::exit(2);
}

// Device memory of one run: freed together.
struct Arena {
  std::vector<void*> blocks;
  ~Arena() {
    for (void* p : blocks) cudaFree(p);
  }
  void* make(size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, std::max<size_t>(bytes, 256)), "cudaMalloc");
    blocks.push_back(p);
    return p;
  }
  template <class Values, class T = typename Values::value_type>
  T* put(const Values& values) {
    T* p = static_cast<T*>(make(values.size() * sizeof(T)));
    check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    return p;
  }
};
template <class T>
void get(Buffer<T>& values, const T* from) {
  check(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "copy to the host");
}

void encode(CUtensorMap* map, const char* name, Element element, const void* address, TensorShape shape, int box_rows) {
  check(encode_tensor_map(map, name, element, address, shape, box_rows));
}

void encode_operand(CUtensorMap* map, CUtensorMap* scales, const char* name, const Operand& o, Arena& arena, int box_rows) {
  const TensorShape shape = {o.mn_major ? o.rows : o.k, o.mn_major ? o.k : o.rows, o.halves, o.experts};
  encode(map, name, o.mx ? Element::kE4m3 : Element::kBf16, arena.put(o.elements), shape, box_rows);
  if (o.mx) {
    encode(scales, "scales", Element::kScaleAtom, arena.put(o.codes), {128, (o.k + 127) / 128, (o.rows + 127) / 128, o.matrices()}, 1);
  }
}

// One launch; results start as `from`, which is dirty where the program must write.
template <Kind kKind, class Config>
Results launch(const Case<kKind, Config>& c, const Results& from, float* milliseconds = nullptr) {
  Arena arena;
  Results r = from;
  Sm100Batch<CUtensorMap> batch = {};
  auto& args = batch.args;
  encode_operand(&args.a, &args.scale_a, "a", c.a, arena, 64);
  encode_operand(&args.b, &args.scale_b, "b", c.b, arena, c.b.mn_major ? 64 : Config::kBoxRowsB);
  const int F = c.shape.f;
  uint16_t *rows = arena.put(r.rows), *saved = arena.put(r.gate_up), *scaled = arena.put(r.scaled_h);
  float *dw = arena.put(r.dw), *partial = arena.put(r.weight_partial);
  auto put_target = [&](const Target& t) { return MxTarget{arena.put(t.elements), arena.put(t.codes)}; };
  args.by_row = put_target(r.by_row);
  args.by_column = put_target(r.by_column);
  args.scaled_h_by_column = put_target(r.scaled_by_column);
  args.m_extent = kKind == kWgradGateUp ? F : c.shape.d;
  if (is_wgrad(kKind)) {
    encode(&args.out, "dw", Element::kFp32, dw, {c.n_extent(), args.m_extent, kKind == kWgradGateUp ? 2 : 1, c.experts()}, 32);
  } else if (!r.rows.empty()) {
    encode(&args.out, "out", Element::kBf16, rows, {c.n_extent(), c.rows, kKind == kDgradDown ? 2 : 1, 1}, 32);
  }
  if (!r.gate_up.empty()) encode(&args.gate_up, "gate_up", Element::kBf16, saved, {F, c.rows, 2, 1}, 32);
  if (!r.scaled_h.empty()) encode(&args.scaled_h, "scaled_h", Element::kBf16, scaled, {F, c.rows, 1, 1}, 32);
  args.gate_up_2xMxF = arena.put(c.gate_up);
  std::vector<Task> tasks = c.tasks;
  for (Task& t : tasks) t.signal = -1;
  args.weight_TxK = arena.put(c.weight);
  args.slot_M = arena.put(c.slot);
  args.weight_partial = partial;
  args.dw = dw;
  args.num_rows = c.rows;
  args.n_extent = c.n_extent();
  args.k_extent = kKind == kDown || kKind == kDgradGateUp ? F : c.shape.d;
  args.save_gate_up = 1;
  args.accumulate = c.accumulate;
  const int count = static_cast<int>(tasks.size());
  // The list is built on the device, as a layer would, and must be the host's.
  const int64_t most = std::max<int64_t>(max_tasks(c.tiling(), c.rows - 128, c.experts()), 1);
  Task* listed = static_cast<Task*>(arena.make(static_cast<size_t>(most) * sizeof(Task)));
  int32_t* length = static_cast<int32_t*>(arena.make(sizeof(int32_t)));
  TaskList list = {};
  static_cast<Tiling&>(list) = c.tiling();
  list.tasks = listed;
  list.num_tasks = length;
  const Status built = build_tasks(c.experts(), arena.put(c.shape.count), arena.put(c.start), &list, 1, nullptr);
  if (!built.ok()) {
    std::printf("{\"error\": \"%s\"}\n", built.message.c_str());
    std::exit(2);
  }
  check(cudaDeviceSynchronize(), "the task list");
  int got_length = 0;
  check(cudaMemcpy(&got_length, length, sizeof(int), cudaMemcpyDeviceToHost), "copy to the host");
  std::vector<Task> got_tasks(static_cast<size_t>(most));
  check(cudaMemcpy(got_tasks.data(), listed, got_tasks.size() * sizeof(Task), cudaMemcpyDeviceToHost), "copy to the host");
  if (got_length != count || (count > 0 && std::memcmp(got_tasks.data(), tasks.data(), tasks.size() * sizeof(Task)) != 0)) {
    std::printf("{\"error\": \"the task list built on the device differs: %d tasks, %d expected\"}\n", got_length, count);
    std::exit(1);
  }
  batch.tasks = listed;
  batch.num_tasks = length;
  const Sm100Tile tile = {Config::kBlocks, Config::kMx};
  const int capacity = count + 5;  // clusters without work are drained
  check(launch_sm100_gemm(kKind, tile, batch, capacity, nullptr));
  check(cudaDeviceSynchronize(), "the kernel");
  if (milliseconds != nullptr) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    constexpr int kRepeats = 20;
    check(cudaEventRecord(begin, nullptr), "event");
    for (int i = 0; i < kRepeats; ++i) check(launch_sm100_gemm(kKind, tile, batch, count, nullptr));
    check(cudaEventRecord(end, nullptr), "event");
    check(cudaEventSynchronize(end), "the kernels");
    check(cudaEventElapsedTime(milliseconds, begin, end), "event");
    *milliseconds /= kRepeats;
  }
  get(r.rows, rows);
  get(r.gate_up, saved);
  get(r.scaled_h, scaled);
  get(r.dw, dw);
  get(r.weight_partial, partial);
  for (auto [host, device] : {std::pair{&r.by_row, args.by_row}, {&r.by_column, args.by_column}, {&r.scaled_by_column, args.scaled_h_by_column}}) {
    get(host->elements, static_cast<const uint8_t*>(device.elements));
    get(host->codes, static_cast<const uint8_t*>(device.codes));
  }
  return r;
}

template <Kind kKind, class Config>
void test(const char* name, const Shape& shape, bool accumulate = false) {
  for (Data data : {Data::kIntegers, Data::kRandom}) {
    const Case<kKind, Config> c(shape, data, accumulate);
    const Results first = launch(c, c.before), second = launch(c, c.before);
    std::string wrong = c.compare(first);
    for (const std::string& f : {c.same("rows of two runs", first.rows, second.rows), c.same("dw of two runs", first.dw, second.dw),
                                 c.same("elements of two runs", first.by_row.elements, second.by_row.elements),
                                 c.same("codes of two runs", first.by_column.codes, second.by_column.codes)}) {
      if (wrong.empty()) wrong = f;
    }
    std::printf("{\"program\": \"%s\", \"format\": \"%s\", \"blocks\": %d, \"d\": %d, \"f\": %d, \"data\": \"%s\", \"accumulate\": %s, \"result\": \"%s\"}\n",
                name, Config::kMx ? "mxfp8" : "bf16", Config::kBlocks, shape.d, shape.f, data == Data::kIntegers ? "integers" : "random",
                accumulate ? "true" : "false", wrong.empty() ? "ok" : wrong.c_str());
    std::fflush(stdout);
    failures += !wrong.empty();
  }
}

// The quantiser around the products, which uses the hardware's conversions: both orientations from one read, against the scale rule by its
// definition, over sixty binades.
void test_quantiser(int rows, int columns) {
  std::mt19937 random(7);
  Buffer<uint16_t> values(static_cast<size_t>(rows) * columns);
  for (uint16_t& v : values) v = bf16(std::ldexp(std::normal_distribution<float>()(random), static_cast<int>(random() % 60) - 30));
  Target expected[2] = {Target(1, rows, columns, false), Target(1, rows, columns, true)};
  for (int along : {0, 1}) oracle_quantize(values, expected[along], 0, along == 1, [](int) { return true; });
  Arena arena;
  QuantizeSource source;
  source.data = arena.put(values);
  source.rows = rows;
  source.columns = columns;
  MxOutput out[2];
  Target got[2] = {Target(1, rows, columns, false), Target(1, rows, columns, true)};  // dirty
  for (int along : {0, 1}) {
    out[along].form = Form::kMx;
    out[along].layout = CodeLayout::kInterleaved;
    out[along].elements = arena.put(got[along].elements);
    out[along].codes = arena.put(got[along].codes);
  }
  check(quantize(source, out[0], out[1], nullptr));
  check(cudaDeviceSynchronize(), "the quantiser");
  std::string wrong;
  for (int along : {0, 1}) {
    get(got[along].elements, static_cast<const uint8_t*>(out[along].elements));
    get(got[along].codes, static_cast<const uint8_t*>(out[along].codes));
    using Any = Case<kDown, Sm100Config<1, kSm100TileN, true, true>>;
    for (const std::string& f : {Any::same(along == 0 ? "elements along rows" : "elements along columns", got[along].elements, expected[along].elements),
                                 Any::same(along == 0 ? "codes along rows" : "codes along columns", got[along].codes, expected[along].codes)}) {
      if (wrong.empty()) wrong = f;
    }
  }
  std::printf("{\"program\": \"quantise\", \"rows\": %d, \"columns\": %d, \"result\": \"%s\"}\n", rows, columns, wrong.empty() ? "ok" : wrong.c_str());
  std::fflush(stdout);
  failures += !wrong.empty();
}

// Every row of `count` experts is real; the values do not matter, and there is no oracle.
template <Kind kKind, class Config>
void bench(const char* name) {
  Case<kKind, Config> c({std::vector<int>(8, 1024), 2048, 1536}, Data::kRandom, false, false);
  float milliseconds = 0;
  launch(c, c.before, &milliseconds);
  const double products = kKind == kGateUp || kKind == kDgradGateUp || kKind == kWgradGateUp ? 2 : 1;
  const double flops = 2.0 * 8 * 1024 * 2048 * 1536 * products;
  std::printf("{\"program\": \"%s\", \"format\": \"%s\", \"blocks\": %d, \"microseconds\": %.1f, \"tflops\": %.0f}\n", name,
              Config::kMx ? "mxfp8" : "bf16", Config::kBlocks, 1e3 * milliseconds, flops / milliseconds / 1e9);
  std::fflush(stdout);
}

template <class Config>
void test_all(const Shape& shape) {
  test<kGateUp, Config>("gate_up", shape);
  test<kDown, Config>("down", shape);
  test<kDgradDown, Config>("dgrad_down", shape);
  test<kDgradGateUp, Config>("dgrad_gate_up", shape);
  test<kWgradDown, Config>("wgrad_down", shape);
  test<kWgradDown, Config>("wgrad_down", shape, true);
  test<kWgradGateUp, Config>("wgrad_gate_up", shape);
}
template <class Config>
void bench_all() {
  bench<kGateUp, Config>("gate_up");
  bench<kDown, Config>("down");
  bench<kDgradDown, Config>("dgrad_down");
  bench<kDgradGateUp, Config>("dgrad_gate_up");
  bench<kWgradDown, Config>("wgrad_down");
  bench<kWgradGateUp, Config>("wgrad_gate_up");
}

// What sm100_kernels.cu compiles.
using Mx1 = Sm100Config<1, kSm100TileN, true, true>;
using Mx2 = Sm100Config<2, kSm100TileN, true, true>;
using Bf1 = Sm100Config<1, kSm100TileN, false, true>;
using Bf2 = Sm100Config<2, kSm100TileN, false, true>;

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "no CUDA device");
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::printf("{\"device\": \"%s\", \"capability\": \"%d.%d\", \"sms\": %d, \"driver\": %d, \"runtime\": %d}\n", device.name, device.major,
              device.minor, device.multiProcessorCount, driver, runtime);
  if (device.major != 10) {
    std::printf("{\"error\": \"these kernels are for compute capability 10.x (B200, GB200, B300, GB300)\"}\n");
    return 2;
  }
  if (what == "bench") {
    bench_all<Mx1>(), bench_all<Mx2>(), bench_all<Bf1>(), bench_all<Bf2>();
    return 0;
  }
  if (what != "test" && what != "small") {
    std::fprintf(stderr, "usage: sm100_device test|small|bench\n");
    return 2;
  }
  test_quantiser(128, 96);
  test_quantiser(384, 544);
  std::vector<Shape> shapes = {{{150, 0, 1, 40}, 160, 224}};
  if (what == "test") shapes.push_back({{900, 3, 0, 517, 128}, 544, 608});  // tiles for every SM, several per cluster
  for (const Shape& shape : shapes) {
    test_all<Mx1>(shape), test_all<Mx2>(shape), test_all<Bf1>(shape), test_all<Bf2>(shape);
  }
  std::printf("{\"failures\": %d}\n", failures);
  return failures == 0 ? 0 : 1;
}
