// The text file that TWINOP_LINEAR_ALGORITHMS names: cuBLASLt's fastest algorithm for each product,
// one per line.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "twinop/linear/cublaslt.h"

namespace twinop::linear {

class AlgorithmFile {
 public:
  // The process's file; its path is empty if the environment names none.
  static AlgorithmFile& Get() {
    static auto& file = *new AlgorithmFile;
    return file;
  }

  bool IsAsked() const { return !path_.empty(); }

  // Returns the algorithm of the first line with this key, or null. A key has no tab.
  const LtAlgorithm* Find(const std::string& key) {
    if (!read_) Read();
    const auto line = known_.find(key);
    return line == known_.end() ? nullptr : &line->second;
  }

  Status Add(const std::string& key, const LtAlgorithm& algorithm) {
    known_[key] = algorithm;
    std::string line = key;
    for (const std::uint64_t word : algorithm.data) line += '\t' + std::to_string(word);
    // One write at the end of the file, so that processes that share it do not mix their lines.
    std::ofstream file(path_, std::ios::app);
    file << line + '\n' << std::flush;
    if (file) return {};
    return Status::Error("TWINOP_LINEAR_ALGORITHMS=" + path_ + ": cannot be written (" +
                         std::strerror(errno) +
                         "). Name a file in a folder that exists and may be written to, or unset "
                         "it");
  }

 private:
  AlgorithmFile() {
    const char* const path = std::getenv("TWINOP_LINEAR_ALGORITHMS");
    if (path != nullptr) path_ = path;
  }

  // Skips lines that it cannot parse; their products are measured again.
  void Read() {
    read_ = true;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) {
      const std::size_t end = line.find('\t');
      if (end == std::string::npos) continue;
      LtAlgorithm algorithm{};
      const char* at = line.c_str() + end;
      bool complete = true;
      for (std::uint64_t& word : algorithm.data) {
        char* next = nullptr;
        word = std::strtoull(at, &next, 10);
        complete = complete && next != at;
        at = next;
      }
      if (complete) known_.emplace(line.substr(0, end), algorithm);
    }
  }

  std::string path_;
  bool read_ = false;
  std::map<std::string, LtAlgorithm> known_;
};

}  // namespace twinop::linear
