#pragma once

#include <string>
#include <string_view>

/// The text that is trained on without --data: mica's own sources and documents, gathered by embed_corpus.cmake.
std::string built_in_corpus();
