// headrace plan with cuda=GPU: the launches of a problem, their work, and a model of their time beside the bound.
#include "tools/headrace/plan_gpu.hpp"

#include <algorithm>
#include <cstdio>

#include "harness/measure.hpp"
#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

constexpr const char* what_it_is = "a model, not measured: docs/performance.md compares it with an H200";

harness::CallBytes bytes_of(const Call& call) {
    std::vector<PlanEntry> entries;
    require(plan(call, &entries));
    harness::CallBytes bytes;
    for (const PlanEntry& entry : entries) {
        const bool read_and_written = entry.name == "pool.states";
        if (entry.role == "input" || read_and_written) bytes.inputs += static_cast<double>(entry.bytes);
        if (entry.role == "output") bytes.outputs += static_cast<double>(entry.bytes);
    }
    return bytes;
}

std::string implementation_of(const Call& call) {
    std::vector<Candidate> candidates;
    require(explain(call, &candidates));
    const auto serves = [](const Candidate& candidate) {
        return candidate.refusal.empty() && candidate.yields.empty();
    };
    const auto found = std::find_if(candidates.begin(), candidates.end(), serves);
    return found == candidates.end() ? std::string() : found->name;
}

std::string milliseconds(double seconds) { return figure(seconds * 1e3); }
std::string microseconds(double seconds) { return seconds > 0 ? figure(seconds * 1e6) : "-"; }
std::string gigaflop(double flop) { return flop > 0 ? figure(flop * 1e-9) : "-"; }
std::string percent(double part, double whole) { return whole > 0 ? fixed(100 * part / whole, 1) + " %" : "-"; }

void print_launches(const GpuPlan& plan) {
    Table grids({"launch", ">blocks", ">threads", ">KiB shared", ">blocks at once", ">waves", ">steps"});
    Table work({"launch", ">MiB in", ">out", ">saved", ">spilled", ">GFLOP tensor", ">multiply-adds", ">GiB tiles",
                ">barriers", ">M issued"});
    std::vector<std::string> parts = {"us of a step"};
    for (const harness::Floor& wait : plan.times[0].waits) parts.push_back(">waits: " + std::string(wait.name));
    parts.insert(parts.end(), {">units", ">step"});
    Table steps(parts);
    std::vector<std::string> titles = {"ms of launch"};
    for (const harness::Floor& floor : plan.times[0].floors) titles.push_back(std::string(">") + floor.name);
    titles.insert(titles.end(), {">modelled", "limit"});
    Table times(titles);
    for (std::size_t i = 0; i < plan.launches.size(); ++i) {
        const LaunchPlan& launch = plan.launches[i];
        const harness::LaunchTime& time = plan.times[i];
        const KernelWork total = launch.total();
        grids.add({launch.kernel, std::to_string(launch.blocks), std::to_string(launch.threads),
                   fixed(static_cast<double>(launch.shared_bytes) / 1024, 1), std::to_string(time.at_once),
                   fixed(time.waves, 0), std::to_string(launch.steps)});
        std::vector<std::string> step = {launch.kernel};
        for (const harness::Floor& wait : time.waits) step.push_back(microseconds(wait.seconds));
        step.insert(step.end(), {microseconds(time.units), microseconds(time.step)});
        if (launch.steps > 0) steps.add(step);
        work.add({launch.kernel, mebibytes(total.input_bytes), mebibytes(total.output_bytes),
                  mebibytes(total.saved_bytes), mebibytes(total.spill_bytes), gigaflop(total.tensor_flop),
                  gigaflop(total.fma_flop) + (launch.arithmetic == DType::f64 ? " f64" : ""),
                  figure(total.tile_bytes / (1 << 30)), std::to_string(static_cast<long long>(total.barriers)),
                  total.issued > 0 ? figure(total.issued * 1e-6) : "-"});
        std::vector<std::string> row = {launch.kernel};
        for (const harness::Floor& floor : time.floors)
            row.push_back(floor.seconds > 0 ? milliseconds(floor.seconds) : "-");
        row.insert(row.end(), {milliseconds(time.seconds), time.limit.name});
        times.add(row);
    }
    grids.print();
    std::printf("\n");
    work.print();
    std::printf("\n");
    steps.print();
    std::printf("\n");
    times.print();
}

json launch_json(const LaunchPlan& launch, const harness::LaunchTime& time) {
    const KernelWork total = launch.total();
    json value = {{"kernel", launch.kernel},
                  {"blocks", launch.blocks},
                  {"idle_blocks", launch.idle_blocks},
                  {"threads", launch.threads},
                  {"registers", launch.registers},
                  {"shared_bytes", launch.shared_bytes},
                  {"arithmetic", headrace::name_of(launch.arithmetic)},
                  {"blocks_at_once", time.at_once},
                  {"waves", time.waves},
                  {"steps", launch.steps},
                  {"all_steps", launch.all_steps},
                  {"step_seconds", time.step},
                  {"input_bytes", total.input_bytes},
                  {"output_bytes", total.output_bytes},
                  {"saved_bytes", total.saved_bytes},
                  {"spill_bytes", total.spill_bytes},
                  {"device_bytes", time.device_bytes},
                  {"tensor_flop", total.tensor_flop},
                  {"fma_flop", total.fma_flop},
                  {"tile_bytes", total.tile_bytes},
                  {"barriers", total.barriers},
                  {"issued", total.issued},
                  {"step_unit_seconds", time.units},
                  {"step_wait_seconds", json::object()},
                  {"floors", json::object()},
                  {"limit", time.limit.name},
                  {"seconds", time.seconds}};
    for (const harness::Floor& wait : time.waits) value["step_wait_seconds"][wait.name] = wait.seconds;
    for (const harness::Floor& floor : time.floors) value["floors"][floor.name] = floor.seconds;
    return value;
}

// The peer's time, and how many times as long the modelled one is.
std::string against(const harness::PeerTime& peer, double seconds) {
    return milliseconds(peer.seconds) + " " + peer.peer + " (" + figure(seconds / peer.seconds) + " x)";
}

}  // namespace

harness::CallTensors planned_shapes(const ProblemLine& line) {
    harness::CallTensors shapes = harness::make_shapes(line);
    if (!line.gpu.empty()) shapes.call.options.planned_gpu = &harness::find_gpu(line.gpu)->limits;
    return shapes;
}

GpuPlan plan_on_gpu(const ProblemLine& line) {
    GpuPlan result;
    result.line = line;
    result.gpu = harness::find_gpu(line.gpu);
    const harness::CallTensors shapes = planned_shapes(line);
    require(line, plan_launches(shapes.call, &result.launches));
    result.implementation = implementation_of(shapes.call);
    const harness::CallBytes bytes = bytes_of(shapes.call);
    for (const LaunchPlan& launch : result.launches) {
        result.times.push_back(harness::model(launch, *result.gpu, bytes));
        result.seconds += result.times.back().seconds;
    }
    result.bound = harness::bound_of(line, harness::least_bytes(shapes.call), *result.gpu);
    result.peers = harness::peers_of(line, *result.gpu);
    return result;
}

void print_gpu_plan(const GpuPlan& plan) {
    const harness::Gpu& gpu = *plan.gpu;
    std::printf("\n%s on %s (%s TB/s, bf16 %s TFLOP/s, by mma.sync %s, f32 %s): %s\n\n", plan.implementation.c_str(),
                gpu.title, figure(gpu.bandwidth * 1e-12).c_str(), figure(gpu.matrix_flop * 1e-12).c_str(),
                figure(gpu.tensor_flop * 1e-12).c_str(), figure(gpu.f32_flop * 1e-12).c_str(), what_it_is);
    if (plan.launches.empty()) {
        std::printf("no launches\n");
        return;
    }
    print_launches(plan);
    std::printf("\n");
    Table sums({"in all", ">GFLOP", ">MiB", ">ms"});
    sums.add({"useful work, bound", figure(plan.bound.flop * 1e-9), mebibytes(plan.bound.bytes),
              milliseconds(plan.bound.seconds)});
    sums.add({"modelled", "", "", milliseconds(plan.seconds)});
    sums.add({"share of the bound", "", "", percent(plan.bound.seconds, plan.seconds)});
    sums.print();
    for (const harness::PeerTime& peer : plan.peers)
        std::printf("published: %s, %s\n", against(peer, plan.seconds).c_str(), peer.source);
}

json to_json(const GpuPlan& plan) {
    const harness::Gpu& gpu = *plan.gpu;
    json value = {{"problem", format(plan.line)},
                  {"name", gpu.name},
                  {"title", gpu.title},
                  {"note", what_it_is},
                  {"implementation", plan.implementation},
                  {"launches", json::array()},
                  {"useful_flop", plan.bound.flop},
                  {"useful_bytes", plan.bound.bytes},
                  {"bound_seconds", plan.bound.seconds},
                  {"seconds", plan.seconds},
                  {"peers", json::array()}};
    for (std::size_t i = 0; i < plan.launches.size(); ++i)
        value["launches"].push_back(launch_json(plan.launches[i], plan.times[i]));
    for (const harness::PeerTime& peer : plan.peers)
        value["peers"].push_back({{"name", peer.peer}, {"seconds", peer.seconds}, {"source", peer.source}});
    return value;
}

void print_peers(const std::vector<GpuPlan>& plans, bool as_json) {
    if (as_json) {
        json list = json::array();
        for (const GpuPlan& plan : plans) list.push_back(to_json(plan));
        write_json("-", list);
        return;
    }
    std::printf("milliseconds on %s, %s; in brackets the modelled time over the published one\n\n", plans[0].gpu->title,
                what_it_is);
    Table table({"problem", "served by", ">bound", ">modelled", ">share", "limit", "published"});
    for (const GpuPlan& plan : plans) {
        std::string published;
        for (const harness::PeerTime& peer : plan.peers)
            published += (published.empty() ? "" : ", ") + against(peer, plan.seconds);
        const auto longest = std::max_element(plan.times.begin(), plan.times.end(),
                                              [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
        ProblemLine line = plan.line;
        line.cuda = false;
        line.gpu.clear();
        table.add({format(line), plan.implementation, milliseconds(plan.bound.seconds), milliseconds(plan.seconds),
                   percent(plan.bound.seconds, plan.seconds), longest->limit.name,
                   published.empty() ? "-" : published});
    }
    table.print();
}

}  // namespace headrace::cli
