#pragma once

// The configuration of rotary embeddings in config.json and in the metadata of GGUF files.

#include <cstdint>
#include <string>

#include <mica/io/families/detail/config_entries.h>
#include <mica/io/families/detail/gguf_source.h>
#include <mica/io/gguf.h>
#include <mica/io/json.h>
#include <mica/nn/rotary_embedding.h>

namespace mica::io::detail {

/// `context`: max_position_embeddings. `is_phi3`: as transformers read the entries of Phi 3, which has partial
/// rotation, and no scaling but longrope.
nn::RotaryConfig rotary_config(const ConfigEntries& entries, std::int64_t context, std::int64_t head_width,
                               double default_theta, bool is_phi3 = false);

/// Writes the form of transformers 5, and also rope_theta and rope_scaling for older versions. `is_phi3`: the original
/// context stands outside of them, too. Throws for dynamic scaling from another original context than `context`.
void add_rotary_entries(JsonValue::Object& entries, const nn::RotaryConfig& config, std::int64_t context,
                        std::int64_t head_width, bool is_phi3 = false);

/// The least rope_theta.
inline constexpr double kLeastTheta = 1.000001;

/// The same for the layers of a kind, full_attention or sliding_attention, if rope_parameters has an object for each.
/// `scaled`: rope_scaling, in older files, is also for this kind.
nn::RotaryConfig rotary_config_of(const ConfigEntries& entries, const char* kind, bool scaled, std::int64_t context,
                                  std::int64_t head_width, double default_theta);
void add_rotary_entries_of_kinds(JsonValue::Object& entries, const nn::RotaryConfig& full,
                                 const nn::RotaryConfig& windowed, std::int64_t context, std::int64_t head_width);

/// rope_parameters for what a GGUF file's metadata say.
JsonValue::Object gguf_rotary_entries(const GgufSource& source);

/// The reverse, to be added to the metadata. Throws for scaling that llama.cpp does not have. That of Llama 3 and of
/// Phi 3 is in tensors.
void add_gguf_rotary(GgufMetadata& metadata, const std::string& architecture, const nn::RotaryConfig& config,
                     std::int64_t head_width);

}  // namespace mica::io::detail
