/* Pages behind the memory of weights. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>

/* Ask for 2 MiB pages behind [start, start + bytes), start being a multiple of that; a wish, not a demand. */
void twofold_advise_large_pages(void *start, size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}
