#ifndef MICA_BENCH_H
#define MICA_BENCH_H

/* A C interface to mica's kernels, to compare them with others from another language in one process.
 *
 * All pointers are device pointers on the calling thread's current CUDA device; tensors are row-major without gaps.
 * Work is queued on `stream` (a cudaStream_t; null: the default stream), and functions do not wait for it. Scratch
 * memory comes from the device's stream-ordered pool. A null pointer means absent (inputs) or not needed (outputs).
 *
 * Every function returns 0 on success. Otherwise nothing was written, and mica_bench_error() returns the reason until
 * the calling thread's next call.
 *
 * dtypes: 0 float32, 1 float16, 2 bfloat16. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The message of the calling thread's last failed call; empty if there was none. */
const char* mica_bench_error(void);

/* y (M, N) = layer norm of the rows of x (M, N), with weight and bias (N) of weight_dtype, which is dtype or float32;
 * mean (2, M) and rstd (M), both or neither, are always float32. mean[1] is the error that the rounding of mean[0]
 * adds to each x_hat = (x - mean[0]) * rstd; if x has 16 bits, it is neither written nor read. */
int mica_layer_norm_forward(const void* x, const void* weight, const void* bias, void* y, float* mean, float* rstd,
                            int64_t M, int64_t N, double eps, int dtype, int weight_dtype, void* stream);

/* The gradients of the above: dx (M, N) of dtype, dweight and dbias (N) of weight_dtype. */
int mica_layer_norm_backward(const void* dy, const void* x, const void* weight, const float* mean, const float* rstd,
                             void* dx, void* dweight, void* dbias, int64_t M, int64_t N, int dtype, int weight_dtype,
                             void* stream);

/* y (M, N) = silu(gate) * up, or gelu(gate) * up: by erf or, if `tanh` is not 0, by tanh. gate and up (M, N): their
 * rows begin `stride` elements apart, which is N for contiguous matrices and 2 N for halves of a matrix (M, 2 N). */
int mica_swiglu_forward(const void* gate, const void* up, void* y, int64_t M, int64_t N, int64_t stride, int dtype,
                        void* stream);
int mica_geglu_forward(const void* gate, const void* up, void* y, int64_t M, int64_t N, int64_t stride, int tanh,
                       int dtype, void* stream);

/* The gradients of the above, with the same strides as gate and up. */
int mica_swiglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t M, int64_t N,
                         int64_t stride, int dtype, void* stream);
int mica_geglu_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t M, int64_t N,
                        int64_t stride, int tanh, int dtype, void* stream);

/* y (M, N) = x / sqrt(mean(x^2) + eps) * weight by rows, with weight (N) of weight_dtype, which is dtype or float32;
 * rstd (M) is always float32. */
int mica_rms_norm_forward(const void* x, const void* weight, void* y, float* rstd, int64_t M, int64_t N, double eps,
                          int dtype, int weight_dtype, void* stream);

/* The gradients of the above: dx (M, N) of dtype, dweight (N) of weight_dtype. */
int mica_rms_norm_backward(const void* dy, const void* x, const void* weight, const float* rstd, void* dx,
                           void* dweight, int64_t M, int64_t N, int dtype, int weight_dtype, void* stream);

/* y (M, N) = softmax of the rows of x. */
int mica_softmax_forward(const void* x, void* y, int64_t M, int64_t N, int dtype, void* stream);

/* The gradient dx (M, N) of the above. */
int mica_softmax_backward(const void* dy, const void* y, void* dx, int64_t M, int64_t N, int dtype, void* stream);

/* sum (M, N) = x + residual, and y (M, N) = layer norm of its rows, otherwise as mica_layer_norm_forward. Fails
 * if there is no fused kernel for these arguments. */
int mica_add_layer_norm_forward(const void* x, const void* residual, const void* weight, const void* bias, void* sum,
                                void* y, float* mean, float* rstd, int64_t M, int64_t N, double eps, int dtype,
                                int weight_dtype, void* stream);

/* The gradients of the above: dx (M, N), which is that of x and of residual, dweight and dbias (N). */
int mica_add_layer_norm_backward(const void* dsum, const void* dy, const void* sum, const void* weight,
                                 const float* mean, const float* rstd, void* dx, void* dweight, void* dbias, int64_t M,
                                 int64_t N, int dtype, int weight_dtype, void* stream);

/* loss (1) = the mean over the rows of z (M, V) of log(sum(exp(z))) - z[label], where z = logits or, if
 * softcap is not 0, softcap * tanh(logits / softcap). Rows whose label is -100 are ignored. For backward:
 * logsumexp (M), mass (M) and denominator (1), always float32. */
int mica_cross_entropy_forward(const void* logits, const int64_t* labels, float* loss, float* logsumexp, float* mass,
                               float* denominator, int64_t M, int64_t V, double softcap, int dtype, void* stream);

/* dlogits (M, V) of the above for a gradient dloss (1) of the loss. */
int mica_cross_entropy_backward(const float* dloss, const void* logits, const int64_t* labels, const float* logsumexp,
                                const float* mass, const float* denominator, void* dlogits, int64_t M, int64_t V,
                                double softcap, int dtype, void* stream);

/* The same in place: forward writes the gradient for a dloss of 1 over the logits, backward multiplies it by dloss. */
int mica_cross_entropy_in_place_forward(void* logits, const int64_t* labels, float* loss, int64_t M, int64_t V,
                                        double softcap, int dtype, void* stream);
int mica_cross_entropy_in_place_backward(const float* dloss, void* dlogits, int64_t M, int64_t V, int dtype,
                                         void* stream);

/* The mean loss of logits x weight^T, for x (M, K) and weight (V, K), and its gradients dx and dweight, by the op
 * linear_cross_entropy and its backward. */
int mica_linear_cross_entropy(const void* x, const void* weight, const int64_t* labels, float* loss, void* dx,
                              void* dweight, int64_t M, int64_t K, int64_t V, int64_t chunk_bytes, int dtype,
                              void* stream);

/* y (M, N) = x (M, K) times the quantized weight given by packed (K * bits / 32, N), scale and zero (groups, N), as in
 * quantized_matmul; scale and zero are of dtype, and null if the mode has none. group: rows per group, or -1 for a
 * whole column. mode: 0 packed, 1 shift, 2 scale, 3 scale_and_shift, 4 fused_multiply_add. */
int mica_quantized_matmul(const void* x, const int32_t* packed, const void* scale, const void* zero, void* y, int64_t M,
                          int64_t N, int64_t K, int bits, int64_t group, int mode, int dtype, void* stream);

/* The peak of bytes in use, since the last call, in the device's stream-ordered pool, from which all of mica's memory
 * comes; -1 on failure. */
int64_t mica_bench_peak_bytes(void);

/* Activations: 0 none, 1 relu, 2 leaky_relu with a slope of 0.01, 3 gelu by erf, 4 gelu by tanh. If `tf32` is
 * not 0, float32 products are computed in TF32.
 *
 * y (M, N) = activation(x weight^T + bias) for x (M, K), weight (N, K), bias (N). `saved` (M, N) is what backward
 * needs in addition to y: x weight^T + bias for gelu, otherwise nothing. */
int mica_linear_forward(const void* x, const void* weight, const void* bias, void* y, void* saved, int64_t M, int64_t K,
                        int64_t N, int activation, int tf32, int dtype, void* stream);

/* The gradients of the above: dx (M, K), dweight (N, K) and dbias (N), from y or, for gelu, from `saved`; dz (M, N)
 * is scratch memory, not needed for activation 0. */
int mica_linear_backward(const void* dy, const void* x, const void* weight, const void* y_or_saved, void* dz, void* dx,
                         void* dweight, void* dbias, int64_t M, int64_t K, int64_t N, int activation, int tf32,
                         int dtype, void* stream);

/* c (M, N) = a x b, or leaky_relu of it if `activation` is not 0, by mica's own kernels. a is (M, K) with rows lda
 * elements apart or, if `transpose_a` is not 0, the transpose of such a matrix (K, M); the same holds for b (K, N). */
int mica_tiled_matmul(const void* a, const void* b, void* c, int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb,
                      int transpose_a, int transpose_b, int activation, int dtype, void* stream);

/* Self-attention of qkv (B, T, 3 * H * D), which has queries, keys and values in this order: y (B, T, H * D), and lse
 * (B, H, T), the logarithms of the rows' sums. If `causal` is not 0, position t sees only those up to t. `dropout`, in
 * [0, 1), drops the same attention weights in each call. backend: 0 mica's own kernel, 1 cuDNN. Fails if the backend
 * was not built. */
int mica_attention_forward(const void* qkv, void* y, float* lse, int64_t B, int64_t H, int64_t T, int64_t D, int causal,
                           double dropout, int backend, int dtype, void* stream);

/* The gradient dqkv (B, T, 3 * H * D) of the above. */
int mica_attention_backward(const void* qkv, const void* y, const float* lse, const void* dy, void* dqkv, int64_t B,
                            int64_t H, int64_t T, int64_t D, int causal, double dropout, int backend, int dtype,
                            void* stream);

#ifdef __cplusplus
}
#endif

#endif
