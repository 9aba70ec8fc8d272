{{- define "dynamo-elastic.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{/* The settings, with the files of the mounted secrets where there are any. */}}
{{- define "dynamo-elastic.settings" -}}
{{- $settings := deepCopy .Values.deployment -}}
{{- if .Values.etcd.secrets.coordinator -}}
{{- $files := dict "ca_file" "/etc/dynamo-elastic-etcd/ca.crt" "cert_file" "/etc/dynamo-elastic-etcd/tls.crt" "key_file" "/etc/dynamo-elastic-etcd/tls.key" -}}
{{- $_ := set $settings "etcd" (merge $files $settings.etcd) -}}
{{- end -}}
{{ toYaml $settings }}
{{- end }}

{{/* Call with the name of a secret. 0400, as the settings want it: so no fsGroup, and no user but root. */}}
{{- define "dynamo-elastic.etcdVolume" -}}
{{- if . }}
- name: etcd
  secret: {secretName: {{ . | quote }}, defaultMode: 0400}
{{- end }}
{{- end }}

{{- define "dynamo-elastic.etcdMount" -}}
{{- if . }}
- {name: etcd, mountPath: /etc/dynamo-elastic-etcd, readOnly: true}
{{- end }}
{{- end }}

{{/* What Dynamo's own processes are told of etcd. */}}
{{- define "dynamo-elastic.dynamoEnvironment" -}}
- {name: DYN_DISCOVERY_BACKEND, value: etcd}
- {name: ETCD_ENDPOINTS, value: {{ join "," .Values.deployment.etcd.endpoints | quote }}}
{{- with .Values.etcd.secrets.dynamo }}
- name: ETCD_AUTH_CA
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: ca.crt}}
- name: ETCD_AUTH_CLIENT_CERT
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: tls.crt}}
- name: ETCD_AUTH_CLIENT_KEY
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: tls.key}}
{{- end }}
{{- end }}
