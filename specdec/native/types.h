/* Types: what Python tells of weights, layers, caches and rows; specdec/native/types.py has the same. */

typedef struct { /* a weight whose high byte has no code; it lies as a zero */
    int32_t output, input;
    float value;
} Odd;

typedef struct { /* outputs of a product in blocks that are of one format */
    const void *weight; /* in panels; or if it is only looked up, `as_in_file`: row after row */
    int64_t format, outputs, as_in_file;
} Part;

typedef struct {
    const void *weight;     /* [panels][inputs][PANEL], zeros up to a whole PAIR; coded [panels][inputs / 2][CODE_BYTES] */
    const float *bias;      /* [outputs] or NULL */
    const uint8_t *highs;   /* [CODES] of coded ones, of which the first is 0 */
    const Odd *odd;         /* by panels, and of one by inputs */
    const int64_t *odd_end; /* [panels] where a panel's end */
    int64_t inputs, outputs, kind;
    int64_t tiles; /* rows are multiplied by tiles */
    const Part *parts; /* [count] of one in blocks, one's outputs after the other's */
    int64_t count;
} Product;

typedef struct {
    Product qkv, out, gate_up, down;
    const float *first_norm, *second_norm; /* [hidden] */
    const float *head_norm;                /* [query_heads + key_heads, head_dim] or NULL */
    const float *out_norm, *down_norm;     /* [hidden], of what is added to the stream, or NULL */
    float first_epsilon, second_epsilon, head_epsilon, out_epsilon, down_epsilon, scale;
    float cap;     /* of attention's scores, by a tanh; 0 for none */
    int32_t turns; /* which cosines and sines */
} Layer;

typedef struct {
    int64_t hidden, query_heads, key_heads, head_dim, inner;
    int64_t half; /* the model computes in bfloat16: the stream between layers and the cache are rounded to it */
    int64_t gelu; /* the MLP's gate is a GELU, by its tanh, and no SiLU */
    int64_t tiles; /* attention multiplies by tiles, where it can */
} Shape;

typedef struct {
    void *keys, *values; /* [key_heads, stride, head_dim] */
    int64_t size, stride, window; /* ring size; slots held; 0 for no window */
} Slots;

typedef struct { /* one sequence's rows */
    int64_t length, first, rows; /* committed tokens; the tree's rows before this block, and of it */
    const int32_t *parents, *depths; /* [first + rows] */
    const Slots *slots; /* its own, of each layer */
} Block;

typedef struct {
    const float *cosines, *sines; /* [rows or positions, head_dim]; the sines' first half negated */
} Turns;

typedef struct { /* the rows of all blocks, one block's after the other's */
    int64_t rows, count, keys; /* blocks; most keys that a row may see */
    const Block *blocks;
    const Turns *turns; /* by a layer's number of them */
    int64_t by_row;     /* these are the rows', one after the other, and not of positions 0, 1, 2, ... */
    const int64_t *tokens;    /* [rows], for rows that begin here; ... */
    const Product *embedding; /* ... and what they are embedded by */
} Rows;

typedef struct { /* the last norm and the head */
    Product product;
    const float *norm; /* [hidden] */
    float epsilon;
} Head;
