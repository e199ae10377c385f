// One client on one connection, one request after the other, not streamed: `probe PORT MODEL KEY REQUESTS`, and the
// quantiles of what each took as a JSON object. The first tenth warms up.
#include "http.hpp"

int main(int, char** argv) {
    begin();
    int port = atoi(argv[1]), count = atoi(argv[4]), warm = count / 10;
    std::string message = request(port, argv[2], argv[3], false);
    int fd = dial(port);
    std::vector<int64_t> took;
    char data[65536];
    for (int n = 0; n < count + warm; n++) {
        int64_t began = now_ns();
        write_all(fd, message);
        std::string in;
        while (true) {
            ssize_t got = read(fd, data, sizeof data);
            if (got <= 0) die("read");
            in.append(data, got);
            size_t head = in.find("\r\n\r\n");
            if (head == std::string::npos) continue;
            std::string lower = in.substr(0, head);
            std::transform(lower.begin(), lower.end(), lower.begin(), ::tolower);
            size_t at = lower.find("content-length:");
            if (at == std::string::npos ? in.compare(in.size() - 5, 5, "0\r\n\r\n") == 0
                                        : in.size() >= head + 4 + strtoul(lower.c_str() + at + 15, nullptr, 10))
                break;
        }
        if (in.compare(9, 3, "200")) {
            fprintf(stderr, "%s\n", in.substr(0, 500).c_str());
            return 1;
        }
        if (n >= warm) took.push_back(now_ns() - began);
    }
    std::sort(took.begin(), took.end());
    printf("{\"p50_ms\":%.4f,\"p99_ms\":%.4f}\n", quantile(took, 0.5), quantile(took, 0.99));
}
