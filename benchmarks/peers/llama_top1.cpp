// llama_top1 MODEL THREADS < ids: for each line of token ids, the best next token after each of them
// by llama.cpp, as a line of ids.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  const int vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::vector<llama_token> ids;
    for (llama_token id; words >> id;) ids.push_back(id);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = static_cast<uint32_t>(ids.size());
    params.n_threads = params.n_threads_batch = std::atoi(argv[2]);
    llama_context* context = llama_init_from_model(model, params);
    llama_batch batch = llama_batch_init(static_cast<int>(ids.size()), 0, 1);
    batch.n_tokens = static_cast<int>(ids.size());
    for (int i = 0; i < batch.n_tokens; ++i) {
      batch.token[i] = ids[i];
      batch.pos[i] = i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) return 1;
    for (int i = 0; i < batch.n_tokens; ++i) {
      const float* logits = llama_get_logits_ith(context, i);
      std::printf("%d ", static_cast<int>(std::max_element(logits, logits + vocab_size) - logits));
    }
    std::printf("\n");
    llama_batch_free(batch);
    llama_free(context);
  }
}
