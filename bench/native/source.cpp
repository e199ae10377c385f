// An upstream that streams: `source PORT TOKENS INTERVAL_US`. Each token is a server-sent event and a write of its own, at
// its time on an absolute schedule, and carries the monotonic nanoseconds of its write as @0123456789012345@ in its text.
// With an interval of 0 the whole answer is one write. One thread, epoll, a heap of deadlines.
#include <queue>

#include "http.hpp"

namespace {

struct Connection {
    std::string in;
    uint64_t stream = 0;  // counts its streams: a deadline of an earlier one is void
    bool open = false;
};

struct Deadline {
    int64_t at, start;
    int fd, token;
    uint64_t stream;
    bool operator<(const Deadline& other) const { return at > other.at; }
};

std::vector<Connection> connections(65536);
std::priority_queue<Deadline> deadlines;
int tokens;
int64_t interval_ns;

const char* const HEAD =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string event(const std::string& data) {
    char size[16];
    snprintf(size, sizeof size, "%zx\r\n", data.size() + 8);
    return size + ("data: " + data + "\n\n\r\n");
}

std::string chunk(const std::string& delta, const char* finish) {
    return event("{\"id\":\"chatcmpl-source\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"source\","
                 "\"choices\":[{\"index\":0,\"delta\":" + delta + ",\"finish_reason\":" + finish + "}]}");
}

std::string token() {
    char text[48];
    snprintf(text, sizeof text, "{\"content\":\"@%016lld@\"}", static_cast<long long>(now_ns()));
    return chunk(text, "null");
}

std::string ending() {
    std::string n = std::to_string(tokens), all = std::to_string(tokens + 20);
    return chunk("{}", "\"stop\"") +
           event("{\"id\":\"chatcmpl-source\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                 "\"model\":\"source\",\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":" + n +
                 ",\"total_tokens\":" + all + "}}") +
           event("[DONE]") + "0\r\n\r\n";
}

void answer(int fd) {
    std::string first = HEAD + chunk("{\"role\":\"assistant\",\"content\":\"\"}", "null");
    uint64_t stream = ++connections[fd].stream;
    if (interval_ns) {
        write_all(fd, first);
        int64_t start = now_ns() + interval_ns;
        deadlines.push({start, start, fd, 0, stream});
        return;
    }
    for (int n = 0; n < tokens; n++) first += token();
    write_all(fd, first + ending());
}

void due(const Deadline& deadline) {
    const Connection& connection = connections[deadline.fd];
    if (!connection.open || connection.stream != deadline.stream) return;
    write_all(deadline.fd, token());
    int next = deadline.token + 1;
    if (next == tokens) {
        write_all(deadline.fd, ending());
    } else {
        deadlines.push({deadline.start + next * interval_ns, deadline.start, deadline.fd, next, deadline.stream});
    }
}

void shut(int fd) {
    connections[fd].open = false;
    connections[fd].in.clear();
    connections[fd].stream++;
    close(fd);
}

void take(int fd) {
    char data[16384];
    ssize_t got = read(fd, data, sizeof data);
    if (got <= 0) {
        if (got == 0 || errno != EAGAIN) shut(fd);
        return;
    }
    std::string& in = connections[fd].in;
    in.append(data, got);
    while (true) {
        size_t head = in.find("\r\n\r\n");
        if (head == std::string::npos) return;
        std::string lower = in.substr(0, head);
        std::transform(lower.begin(), lower.end(), lower.begin(), ::tolower);
        size_t at = lower.find("content-length:");
        size_t length = at == std::string::npos ? 0 : strtoul(lower.c_str() + at + 15, nullptr, 10);
        if (in.size() < head + 4 + length) return;
        bool post = in.compare(0, 5, "POST ") == 0;
        in.erase(0, head + 4 + length);
        if (post) {
            answer(fd);
        } else {
            write_all(fd, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 27\r\n\r\n"
                          "{\"object\":\"list\",\"data\":[]}\n");
        }
    }
}

}  // namespace

int main(int, char** argv) {
    begin();
    tokens = atoi(argv[2]);
    interval_ns = atoll(argv[3]) * 1000;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_port = htons(atoi(argv[1]));
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, reinterpret_cast<sockaddr*>(&here), sizeof here) || listen(listener, 4096)) die("listen");
    int poll = epoll_create1(0);
    epoll_event interest{EPOLLIN, {.fd = listener}};
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &interest);
    std::vector<epoll_event> events(1024);
    while (true) {
        timespec wait{1, 0};
        if (!deadlines.empty()) {
            int64_t left = std::max<int64_t>(deadlines.top().at - now_ns(), 0);
            wait = {left / 1'000'000'000, left % 1'000'000'000};
        }
        int count = epoll_pwait2(poll, events.data(), events.size(), &wait, nullptr);
        for (int n = 0; n < count; n++) {
            int fd = events[n].data.fd;
            if (fd != listener) {
                take(fd);
                continue;
            }
            while ((fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK)) >= 0) {
                no_delay(fd);
                connections[fd].open = true;
                epoll_event readable{EPOLLIN, {.fd = fd}};
                epoll_ctl(poll, EPOLL_CTL_ADD, fd, &readable);
            }
        }
        for (int64_t now = now_ns(); !deadlines.empty() && deadlines.top().at <= now;) {
            Deadline next = deadlines.top();
            deadlines.pop();
            due(next);
        }
    }
}
