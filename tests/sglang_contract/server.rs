//! An HTTP server of a few lines over raw TCP, so that a test decides about
//! every byte and every close.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// What is done with one request.
#[derive(Clone, Debug)]
pub enum Answer {
    /// These bytes in pieces of so many, then the next request.
    Keep(Vec<u8>, usize),
    /// These bytes, then the connection is closed.
    Close(Vec<u8>, usize),
    /// These bytes, then nothing until the client closes.
    Hang(Vec<u8>),
}

pub struct Request {
    pub line: String,
    pub headers: String,
    pub body: Vec<u8>,
    /// Which connection it came on, from 0.
    pub connection: usize,
}

pub struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    /// Connections whose client has closed them, too.
    pub closed_by_client: watch::Receiver<usize>,
}

impl Server {
    /// Answers the requests in the order in which they come.
    pub async fn start(answers: Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (closed, closed_by_client) = watch::channel(0);
        let closed = Arc::new(closed);
        let kept = Arc::clone(&requests);
        tokio::spawn(async move {
            let connections = AtomicUsize::new(0);
            while let Ok((socket, _)) = listener.accept().await {
                let connection = connections.fetch_add(1, Ordering::Relaxed);
                let (answers, kept, closed) =
                    (Arc::clone(&answers), Arc::clone(&kept), Arc::clone(&closed));
                tokio::spawn(async move {
                    serve(socket, connection, &answers, &kept, &closed).await;
                });
            }
        });
        Self {
            address,
            requests,
            closed_by_client,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

async fn serve(
    mut socket: TcpStream,
    connection: usize,
    answers: &Mutex<VecDeque<Answer>>,
    requests: &Mutex<Vec<Request>>,
    closed: &watch::Sender<usize>,
) {
    socket.set_nodelay(true).unwrap();
    while let Some((line, headers, body)) = read_request(&mut socket).await {
        requests.lock().unwrap().push(Request {
            line,
            headers,
            body,
            connection,
        });
        let answer = answers.lock().unwrap().pop_front();
        let (bytes, piece) = match &answer {
            Some(Answer::Keep(bytes, piece) | Answer::Close(bytes, piece)) => (bytes, *piece),
            Some(Answer::Hang(bytes)) => (bytes, bytes.len().max(1)),
            None => return,
        };
        for piece in bytes.chunks(piece) {
            if socket.write_all(piece).await.is_err() || socket.flush().await.is_err() {
                return;
            }
            // Each piece is a segment of its own as often as can be had.
            tokio::task::yield_now().await;
        }
        match answer {
            Some(Answer::Keep(..)) => {}
            None => return,
            Some(Answer::Close(..) | Answer::Hang(_)) => {
                if matches!(answer, Some(Answer::Close(..))) {
                    let _ = socket.shutdown().await;
                }
                let mut rest = [0; 64];
                while matches!(socket.read(&mut rest).await, Ok(n) if n > 0) {}
                closed.send_modify(|n| *n += 1);
                return;
            }
        }
    }
}

async fn read_request(socket: &mut TcpStream) -> Option<(String, String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head
        .lines()
        .find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("content-length:")
                .map(|n| n.trim().parse().unwrap())
        })
        .unwrap_or(0);
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await.ok()?;
    let (line, headers) = head.split_once("\r\n").unwrap();
    Some((line.to_owned(), headers.to_owned(), body))
}

/// A whole reply with its length.
pub fn reply(status: u16, kind: &str, extra: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "HTTP/1.1 {status} X\r\nserver: uvicorn\r\ncontent-length: {}\r\ncontent-type: \
         {kind}\r\n{extra}\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// A reply in chunks of so many bytes; without the last chunk if `cut`.
pub fn chunked(kind: &str, body: &[u8], size: usize, cut: bool) -> Vec<u8> {
    let mut bytes =
        format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n")
            .into_bytes();
    for chunk in body.chunks(size) {
        bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        bytes.extend_from_slice(chunk);
        bytes.extend_from_slice(b"\r\n");
    }
    if !cut {
        bytes.extend_from_slice(b"0\r\n\r\n");
    }
    bytes
}
