// headrace list: operators, presets and implementations.
#include <cstdio>
#include <memory>

#include "tools/headrace/common.hpp"
#include "tools/headrace/table.hpp"

namespace headrace::cli {
namespace {

struct Row {
    Operator op;
    const char *rule, *gate, *formula;
};

// a_t = exp(log gate); o_t = scale * S_t^T q_t after the update.
const Row rows[] = {
    {Operator::linear_attention, "additive", "none", "S <- S + k v^T"},
    {Operator::retention, "additive", "head", "S <- a S + k v^T, a constant per head"},
    {Operator::simple_gla, "additive", "step, head", "S <- a_t S + k v^T"},
    {Operator::gla, "additive", "channel, head", "S <- diag(a_t) S + k v^T"},
    {Operator::delta_rule, "delta", "none", "S <- S + k d^T, d = beta (v - S^T k)"},
    {Operator::gated_delta_rule, "delta", "step, head", "S' = a_t S; S <- S' + k d^T, d = beta (v - S'^T k)"},
    {Operator::comba, "delta", "step, head", "S <- a_t S + k d^T, d = beta (v - S^T p)"},
    {Operator::kda, "delta", "channel, head", "S' = diag(a_t) S; S <- S' + k d^T, d = beta (v - S'^T k)"},
};

void print_json() {
    json value;
    for (const Row& row : rows) {
        value["operators"].push_back(
            {{"name", headrace::name_of(row.op)}, {"rule", row.rule}, {"gate", row.gate}, {"formula", row.formula}});
    }
    for (const harness::Preset& preset : harness::presets()) {
        value["presets"].push_back({{"name", preset.name}, {"line", preset.line}, {"source", preset.source}});
    }
    value["implementations"] = implementations();
    write_json("-", value);
}

void print_text() {
    Table operators({"operator", "rule", "gates", "state update; then o = scale S^T q"});
    for (const Row& row : rows) operators.add({headrace::name_of(row.op), row.rule, row.gate, row.formula});
    operators.print();
    std::printf("\n");
    Table presets({"preset", "problem", "source"});
    for (const harness::Preset& preset : harness::presets()) presets.add({preset.name, preset.line, preset.source});
    presets.print();
    std::printf("\nimplementations (headrace explain PROBLEM says which one serves a problem)\n");
    for (const std::string& name : implementations()) std::printf("  %s\n", name.c_str());
}

}  // namespace

void add_list(CLI::App& app, int*) {
    CLI::App* command = app.add_subcommand("list", "Print the operators, presets and implementations.");
    auto as_json = std::make_shared<bool>(false);
    command->add_flag("--json", *as_json, "Print JSON");
    command->footer("Example: headrace list --json");
    command->callback([as_json] { *as_json ? print_json() : print_text(); });
}

}  // namespace headrace::cli
