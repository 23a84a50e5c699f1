// Writes llama.cpp's logits for given token ids: the oracle that our GGUF models are compared with.
//
// usage: llamacpp_logits MODEL.gguf TOKENS OUT
//   TOKENS: int32 little-endian: number of sequences, then for each its length and its ids
//   OUT:    float32 logits [sum of lengths, vocabulary], in order
// build:  g++ -O2 -std=c++17 -I llama.cpp/include -I llama.cpp/ggml/include tools/llamacpp_logits.cpp \
//             -L BUILD/bin -Wl,-rpath,BUILD/bin -lllama -lggml -lggml-base -o llamacpp_logits
#include <cstdint>
#include <cstdio>
#include <vector>

#include "llama.h"

static std::vector<int32_t> read_ints(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) return {};
  std::fseek(file, 0, SEEK_END);
  std::vector<int32_t> ints(std::ftell(file) / sizeof(int32_t));
  std::fseek(file, 0, SEEK_SET);
  const size_t got = std::fread(ints.data(), sizeof(int32_t), ints.size(), file);
  std::fclose(file);
  ints.resize(got);
  return ints;
}

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s MODEL.gguf TOKENS OUT\n", argv[0]);
    return 2;
  }
  const std::vector<int32_t> ints = read_ints(argv[2]);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  std::FILE* out = std::fopen(argv[3], "wb");
  if (model == nullptr || out == nullptr || ints.empty()) {
    std::fprintf(stderr, "cannot open the model, the tokens or the output\n");
    return 1;
  }
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  size_t at = 1;
  for (int32_t i = 0; i < ints[0]; ++i) {
    const int32_t length = ints[at++];
    llama_context_params params = llama_context_default_params();
    params.n_ctx = length;
    params.n_batch = length;
    params.n_ubatch = length;
    params.n_threads = 2;
    params.n_threads_batch = 2;
    llama_context* context = llama_init_from_model(model, params);
    llama_batch batch = llama_batch_init(length, 0, 1);
    batch.n_tokens = length;
    for (int32_t j = 0; j < length; ++j) {
      batch.token[j] = ints[at + j];
      batch.pos[j] = j;
      batch.n_seq_id[j] = 1;
      batch.seq_id[j][0] = 0;
      batch.logits[j] = 1;
    }
    at += length;
    if (llama_decode(context, batch) != 0) {
      std::fprintf(stderr, "llama_decode failed for sequence %d\n", i);
      return 1;
    }
    for (int32_t j = 0; j < length; ++j) std::fwrite(llama_get_logits_ith(context, j), sizeof(float), vocab, out);
    llama_batch_free(batch);
    llama_free(context);
  }
  std::fclose(out);
  llama_model_free(model);
  return 0;
}
