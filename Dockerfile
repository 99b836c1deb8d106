# Two stages: the first builds the environment, the second carries only that.
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY scheduler scheduler
COPY engine engine
COPY configs configs
RUN python -m venv /opt/hexlm && /opt/hexlm/bin/pip install --no-cache-dir .

FROM python:3.13-slim
RUN useradd --create-home --uid 10001 hexlm \
    && mkdir -p /home/hexlm/.cache && chown hexlm:hexlm /home/hexlm/.cache
COPY --from=build /opt/hexlm /opt/hexlm
USER hexlm
WORKDIR /home/hexlm
# Models and compiled kernels are kept here; give it a volume to keep them longer.
VOLUME /home/hexlm/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["/opt/hexlm/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=4)"]
ENTRYPOINT ["/opt/hexlm/bin/hexlm"]
CMD ["serve", "--host", "0.0.0.0"]
