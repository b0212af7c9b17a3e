#pragma once

// The configuration of rotary embeddings in config.json and in the metadata of GGUF files.

#include <cstdint>

#include <mica/io/families/detail/config_entries.h>
#include <mica/io/families/detail/gguf_source.h>
#include <mica/io/json.h>
#include <mica/nn/rotary_embedding.h>

namespace mica::io::detail {

/// `context`: max_position_embeddings.
nn::RotaryConfig rotary_config(const ConfigEntries& entries, std::int64_t context, std::int64_t head_width,
                               double default_theta);

/// Writes the form of transformers 5, and also rope_theta and rope_scaling for older versions.
void add_rotary_entries(JsonValue::Object& entries, const nn::RotaryConfig& config);

/// The least rope_theta.
inline constexpr double kLeastTheta = 1.000001;

/// The same for the layers of a kind, full_attention or sliding_attention, if rope_parameters has an object for each.
/// `scaled`: rope_scaling, in older files, is also for this kind.
nn::RotaryConfig rotary_config_of(const ConfigEntries& entries, const char* kind, bool scaled, std::int64_t context,
                                  std::int64_t head_width, double default_theta);
void add_rotary_entries_of_kinds(JsonValue::Object& entries, const nn::RotaryConfig& full,
                                 const nn::RotaryConfig& windowed);

/// rope_parameters for what a GGUF file's metadata say.
JsonValue::Object gguf_rotary_entries(const GgufSource& source);

}  // namespace mica::io::detail
