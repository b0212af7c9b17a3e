// Tokenizes many documents and reports MB/s for each number of threads. tokenizer_peers.py compares its output with
// that of the Python package `tokenizers`.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "examples/common/command_line.h"
#include <mica/core/check.h>
#include <mica/io/file.h>
#include <mica/io/tokenizer.h>

using namespace mica;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Each document is stored as its length, a little-endian uint32, and its bytes.
std::vector<std::string> read_documents(const std::string& path) {
  const io::MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  std::vector<std::string> documents;
  for (std::size_t at = 0; at < bytes.size();) {
    std::uint32_t length = 0;
    check(bytes.size() - at >= sizeof(length), "{}: it ends within a length", path);
    std::memcpy(&length, bytes.data() + at, sizeof(length));
    at += sizeof(length);
    check(bytes.size() - at >= length, "{}: it ends within a document", path);
    documents.emplace_back(reinterpret_cast<const char*>(bytes.data() + at), length);
    at += length;
  }
  return documents;
}

void write_number(std::ofstream& file, std::size_t number) {
  const auto value = static_cast<std::uint32_t>(number);
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Encodes documents and reports the rate in MB/s of text.", "bench_tokenizer");
  std::string model, documents_path, tokens_path, text_path;
  int threads = 2, repeat = 3;
  command_line.add_option("--model", model, "Folder with tokenizer.json").required();
  command_line
      .add_option("--documents", documents_path, "File of documents, each stored as a uint32 length and its bytes")
      .required();
  command_line.add_option("--threads", threads, "Encode with one thread and with this many").at_least(1);
  command_line.add_option("--repeat", repeat, "Number of runs; the fastest counts").at_least(1);
  command_line.add_option("--tokens-out", tokens_path,
                          "File for each document's tokens: uint32 count and uint32 tokens");
  command_line.add_option("--text-out", text_path, "File for the decoded tokens, in the format of the documents");
  return command_line.run(argc, argv, [&] {
    const auto start = Clock::now();
    const io::Tokenizer tokenizer = io::Tokenizer::load(model);
    fmt::print("load: {:.2f} s, {} tokens\n", seconds_since(start), tokenizer.vocabulary_size());
    const std::vector<std::string> documents = read_documents(documents_path);
    double bytes = 0;
    for (const std::string& document : documents) {
      bytes += static_cast<double>(document.size());
    }
    std::vector<std::vector<std::int64_t>> tokens;
    for (const int count : {1, threads}) {
      double fastest = 1e30, least_work = 1e30;
      for (int i = 0; i < repeat; ++i) {
        const auto begin = Clock::now();
        const std::clock_t before = std::clock();
        tokens = tokenizer.encode_batch(documents, {}, count);
        fastest = std::min(fastest, seconds_since(begin));
        least_work = std::min(least_work, static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC);
      }
      fmt::print("encode {:.1f} MB, {} threads: {:.1f} MB/s; {:.1f} MB per second of CPU time\n", bytes / 1e6, count,
                 bytes / fastest / 1e6, bytes / least_work / 1e6);
    }
    if (!tokens_path.empty()) {
      std::ofstream file(tokens_path, std::ios::binary);
      for (const auto& document : tokens) {
        write_number(file, document.size());
        for (const std::int64_t token : document) {
          write_number(file, static_cast<std::size_t>(token));
        }
      }
      check(file.flush().good(), "cannot write {}", tokens_path);
    }
    if (!text_path.empty()) {
      std::ofstream file(text_path, std::ios::binary);
      const auto begin = Clock::now();
      double decoded = 0;
      for (const auto& document : tokens) {
        const std::string text = tokenizer.decode(document);
        decoded += static_cast<double>(text.size());
        write_number(file, text.size());
        file.write(text.data(), static_cast<std::streamsize>(text.size()));
      }
      fmt::print("decode: {:.1f} MB/s\n", decoded / seconds_since(begin) / 1e6);
      check(file.flush().good(), "cannot write {}", text_path);
    }
  });
}
