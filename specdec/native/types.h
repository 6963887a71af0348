/* Types: the descriptions of weights, layers, caches and rows that Python passes; specdec/native/types.py has the
 * same. */

typedef struct { /* a weight whose high byte has no code; the panel has a zero in its place */
    int32_t output, input;
    float value;
} Odd;

typedef struct { /* outputs of a product in blocks that share a format */
    const void *weight; /* in panels; or, `as_in_file`, row after row, for look-ups only */
    int64_t format, outputs, as_in_file;
} Part;

typedef struct {
    const void *weight;     /* [panels][inputs][PANEL], padded to a PAIR; coded [panels][inputs / 2][CODE_BYTES] */
    const float *bias;      /* [outputs] or NULL */
    const uint8_t *highs;   /* [CODES] of a coded weight; the first is 0 */
    const Odd *odd;         /* ordered by panel, then by input */
    const int64_t *odd_end; /* [panels] index behind each panel's last odd weight */
    int64_t inputs, outputs, kind;
    int64_t tiles; /* whether rows are multiplied by tiles */
    const Part *parts; /* [count] of a weight in blocks, in order of outputs */
    int64_t count;
} Product;

typedef struct { /* experts, of which each row is multiplied with a few */
    Product router; /* to a logit for each expert */
    const Product *gate_up, *down; /* [count] */
    int64_t count, chosen;
    int64_t norm_topk; /* whether the shares of a row's experts add up to one; else those of all experts do */
} Experts;

typedef struct {
    Product qkv, out, gate_up, down;
    const Experts *experts; /* in place of gate_up and down, or NULL */
    const float *first_norm, *second_norm; /* [hidden]; the first may be NULL: rows are read as they are */
    const float *head_norm;                /* [query_heads + key_heads, head_dim] or NULL */
    const float *out_norm, *down_norm;     /* [hidden], norms of attention's and the MLP's outputs, or NULL */
    float first_epsilon, second_epsilon, head_epsilon, out_epsilon, down_epsilon, scale;
    float cap;     /* bound of attention's scores, applied by tanh; 0 for none */
    int32_t turns; /* index of its cosines and sines */
    int32_t norms_all; /* whether head_norm is one norm of all queries and one of all keys; else one for each head */
} Layer;

typedef struct {
    int64_t hidden, query_heads, key_heads, head_dim;
    int64_t inner, experts; /* width of the widest MLP; most experts of a layer */
    int64_t half; /* whether the model computes in bfloat16: the stream between layers and the cache are rounded */
    int64_t gelu; /* whether the MLP's gate is GELU in its tanh form; else SiLU */
    int64_t tiles; /* whether attention multiplies by tiles, where it can */
} Shape;

typedef struct {
    void *keys, *values; /* [key_heads, stride, head_dim] */
    int64_t size, stride, window; /* ring size; slots allocated; 0 for no window */
} Slots;

typedef struct { /* the rows of one sequence */
    int64_t length, first, rows; /* committed tokens; the tree's rows before this block; the block's rows */
    const int32_t *parents, *depths; /* [first + rows] */
    const Slots *slots; /* its cache, by layer */
} Block;

typedef struct {
    const float *cosines, *sines; /* [rows or positions, head_dim]; the first half of the sines is negated */
} Turns;

typedef struct { /* the rows of all blocks, block after block */
    int64_t rows, count, keys; /* count: blocks; keys: most keys that a row may see */
    const Block *blocks;
    const Turns *turns; /* by a layer's index of them */
    int64_t by_row;     /* whether they are by row; else they are of positions 0, 1, 2, ... */
    const int64_t *tokens;    /* [rows], for rows that start at the first layer; ... */
    const Product *embedding; /* ... and their embedding */
    const int32_t *spans;     /* [layers, rows, 2] positions that a row sees, as first and end; NULL: its path */
    const void *reads;        /* [rows, inputs of qkv] what the first layer's attention reads; NULL: the stream, normed */
    const uint8_t *parts;     /* [layers] the parts of each that run, ATTENTION, MLP or both; NULL: all */
} Rows;

enum { ATTENTION = 1, MLP = 2 };
INLINE int runs(const Rows *all, int64_t n, int part) { return !all->parts || all->parts[n] & part; }

typedef struct { /* the last norm and the head */
    Product product;
    const float *norm; /* [hidden]; NULL: the stream is read as it is */
    float epsilon;
} Head;
