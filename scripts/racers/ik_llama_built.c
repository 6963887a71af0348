/* What ik_llama_built.py calls of ik_llama.cpp, compiled with the headers of a checkout: its structures change. */
#include <stddef.h>

#include "llama.h"

/* A context of 2,048 tokens, with run-time repacking; NULL where the file is not read. */
void *racer_open(const char *file, int threads, int flash) {
    llama_backend_init();
    struct llama_model_params given = llama_model_default_params();
    given.use_mmap = false, given.repack_tensors = true, given.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(file, given);
    if (!model) return NULL;
    struct llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = wanted.n_batch = 2048, wanted.n_threads = wanted.n_threads_batch = threads, wanted.flash_attn = flash;
    return llama_init_from_model(model, wanted);
}

void racer_clear(void *context) { llama_kv_cache_clear(context); }

/* The likeliest token behind some more tokens, or -1 where they are refused. */
int racer_run(void *context, int *tokens, int count, int past) {
    if (llama_decode(context, llama_batch_get_one(tokens, count, past, 0))) return -1;
    const float *logits = llama_get_logits_ith(context, -1);
    const int size = llama_n_vocab(llama_get_model(context));
    int best = 0;
    for (int n = 1; n < size; n++)
        if (logits[n] > logits[best]) best = n;
    return best;
}
