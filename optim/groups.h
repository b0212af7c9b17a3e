#pragma once

#include <string>
#include <vector>

#include <mica/nn/module.h>

namespace mica::optim {

/// Divides parameters by name, so that groups can have different options: one list for each entry of `patterns`, and a
/// last one for the rest. A parameter goes to the first entry with a pattern that matches its whole name; * stands for
/// any characters, ? for one.
///
///     auto lists = optim::group_by_name(model.named_parameters(), {{"*.bias", "*norm*"}, {"lm_head.*"}});
///     optim::AdamW adamw({{lists[0], {.weight_decay = 0}}, {lists[1], {.lr = 1e-4}}, {lists[2], {}}});
///
/// Throws for a pattern that matches no name, since it is probably misspelled.
std::vector<Tensors> group_by_name(const nn::NamedTensors& parameters,
                                   const std::vector<std::vector<std::string>>& patterns);

}  // namespace mica::optim
