#pragma once

#include <string>
#include <string_view>

/// The default training text: mica's own sources and documents, collected by embed_corpus.cmake.
std::string built_in_corpus();
