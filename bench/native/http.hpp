// What the source, the sink and the probe share: a clock, sockets, and the little of HTTP/1.1 that they speak.
#pragma once
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

inline int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);  // the same clock in every process of this machine
    return at.tv_sec * 1'000'000'000LL + at.tv_nsec;
}

[[noreturn]] inline void die(const char* what) {
    perror(what);
    exit(1);
}

inline void begin() {
    signal(SIGPIPE, SIG_IGN);
    rlimit files{65536, 65536};
    if (setrlimit(RLIMIT_NOFILE, &files)) {
        getrlimit(RLIMIT_NOFILE, &files);
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

inline void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

inline int dial(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to)) die("connect");
    no_delay(fd);
    return fd;
}

inline void write_all(int fd, const std::string& text) {
    size_t done = 0;
    while (done < text.size()) {
        ssize_t sent = write(fd, text.data() + done, text.size() - done);
        if (sent > 0) {
            done += sent;
        } else if (errno != EAGAIN && errno != EINTR) {
            return;  // the other side has gone; reading will tell
        }
    }
}

inline std::string request(int port, const std::string& model, const std::string& key, bool stream) {
    std::string body = "{\"model\":\"" + model + "\",\"max_tokens\":4096,\"messages\":[{\"role\":\"user\",\"content\":" +
                       "\"Write a few words about the sea, its tides and its light.\"}]" +
                       (stream ? ",\"stream\":true}" : "}");
    return "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:" + std::to_string(port) +
           "\r\nContent-Type: application/json\r\nAuthorization: Bearer " + key +
           "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

inline double quantile(std::vector<int64_t>& sorted, double share) {
    if (sorted.empty()) return 0;
    return sorted[std::min(sorted.size() - 1, static_cast<size_t>(share * sorted.size()))] / 1e6;
}
