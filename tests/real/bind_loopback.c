/*
 * Preloaded into an engine: a socket that would be bound to every interface is
 * bound to loopback instead. SGLang's --host covers its HTTP port only; the
 * rendezvous of torch and the sockets between its processes have no such option.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

typedef int (*bind_fn)(int, const struct sockaddr *, socklen_t);

int bind(int fd, const struct sockaddr *address, socklen_t length) {
  bind_fn next = (bind_fn)dlsym(RTLD_NEXT, "bind");
  if (address != NULL && address->sa_family == AF_INET &&
      length >= sizeof(struct sockaddr_in)) {
    struct sockaddr_in v4;
    memcpy(&v4, address, sizeof v4);
    if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
      v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return next(fd, (const struct sockaddr *)&v4, sizeof v4);
    }
  }
  if (address != NULL && address->sa_family == AF_INET6 &&
      length >= sizeof(struct sockaddr_in6)) {
    struct sockaddr_in6 v6;
    memcpy(&v6, address, sizeof v6);
    if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) {
      /* Whoever dials 127.0.0.1 must reach a dual-stack socket, hence the
       * mapped address and not ::1. */
      static const unsigned char mapped[16] = {0, 0, 0, 0, 0,    0,    0,   0,
                                               0, 0, 0xff, 0xff, 127, 0, 0, 1};
      memcpy(&v6.sin6_addr, mapped, sizeof mapped);
      return next(fd, (const struct sockaddr *)&v6, sizeof v6);
    }
  }
  return next(fd, address, length);
}
